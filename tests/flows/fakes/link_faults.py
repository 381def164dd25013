"""A trainer rank on a network with a bad HCA.

It reads the lines `device step [down]` of `RUN.bad-hca` beside the run directory: from that step on, as long as
`NCCL_IB_HCA` lets NCCL use the device, it writes the line that NCCL writes into NCCL's log and dies, every time; with
`down` the port's state in the recipe's folder of ports changes instead.
"""

import json
import os
import platform
from pathlib import Path
from typing import Any

from k31core.cluster.nccl_hca import parse_selector
from tests.flows.fakes import workers
from tests.unit.cluster.sysfs_tree import DOWN, write_port

LINE = (
    "{host}:{pid}:{pid} [0] net_ib.cc:1390 NCCL WARN NET/IB: Got completion from peer 10.0.0.2<42024> with "
    "status=IBV_WC_RETRY_EXC_ERR(12) opcode=IBV_WC_RDMA_WRITE(1) reqSize=0 vendor_err=129 req_type=Send hca {device}"
)


class TrainWorker(workers.TrainWorker):
    """The small trainer, on a network."""

    def __init__(self, recipe_json: str, **others: Any) -> None:
        super().__init__(recipe_json, **others)
        self.ports = Path(json.loads(recipe_json)["cluster"]["infiniband_root"])

    def train(self, step: int, rollout_dir: str) -> dict[str, Any]:
        self._use_network(step)
        return super().train(step, rollout_dir)

    def _use_network(self, step: int) -> None:
        value = os.environ.get("NCCL_IB_HCA")
        with (self.run_dir / "network.jsonl").open("a") as log:
            log.write(json.dumps({"step": step, "rank": self.rank, "NCCL_IB_HCA": value}) + "\n")
        fault = self.run_dir.with_name(f"{self.run_dir.name}.bad-hca")
        if not fault.exists():
            return
        for line in fault.read_text().splitlines():
            device, first, *down = line.split()
            if step >= int(first) and (value is None or parse_selector(value).selects(device, 1)):
                self._lose(device, bool(down))

    def _lose(self, device: str, down: bool) -> None:
        if down:
            write_port(self.ports, device, **DOWN)
        else:
            name = os.environ["NCCL_DEBUG_FILE"].replace("%h", platform.node()).replace("%p", str(os.getpid()))
            with open(name, "a") as log:
                log.write(LINE.format(host=platform.node(), pid=os.getpid(), device=device) + "\n")
        os._exit(1)
