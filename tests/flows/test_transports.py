"""Every way of publishing an adapter, through the real flow: real workers, and SGLang's stand-in as the server that our
own launcher starts from the recipe.

The engine sleeps while the trainer works and forgets its base where the recipe keeps no copy. The transports must end
in the same adapter, and the canary of every step must agree: it is computed by the engine with what arrived.
"""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.flows.conftest import ROOT, Lab
from tests.loop_inputs import write_loop_inputs
from tests.unit.sglang.test_sglang_versions import K31_LORA, write_tree

pytestmark = [pytest.mark.flows, pytest.mark.timeout(3000)]
RECIPE = (
    "rollout.engine.kind=sglang",
    "cluster.colocate=true",
    "rollout.prompts_per_step=2",
    "rollout.samples_per_prompt=4",
    "rollout.max_response_tokens=8",
    "rollout.top_logprobs_num=8",
    "train.lora.rank=4",
    "train.lora.alpha=8",
    "save.interval=2",
    "env.variables.K31_STANDIN_ALPHA='8'",
    "data.heldout=null",
    "rollout.engine.startup_timeout_s=240",
    "sync.bucket_bytes=20000",
)
BASE_AGAIN = ("rollout.engine.lora_base_cpu_backup=false", "sync.resend_base=true")


def inputs(root: Path) -> tuple[Path, Path, Path]:
    """(model, data, folder with a package that calls itself sglang)."""
    model, data = write_loop_inputs(root)
    tree = Path(write_tree(root / "tree", "0.5.23.dev7", K31_LORA, lora=""))
    (tree / "sglang" / "__init__.py").write_text("")
    launch = "from tests.sglang_standin.server import command_line\nif __name__ == '__main__':\n    command_line()\n"
    (tree / "sglang" / "launch_server.py").write_text(launch)
    return model, data, tree


def run(lab: Lab, made: tuple[Path, Path, Path], asked: dict[str, tuple[str, ...]]) -> dict[str, dict[str, str]]:
    """Final states of one flow run a name."""
    model, data, tree = made
    parameters = []
    for run_id, overrides in asked.items():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1] % 30000 + 20000
        changes = (*RECIPE, f"rollout.engine.sglang_path={tree}", f"rollout.engine.port={port}", *overrides)
        parameters.append(lab.parameters(run_id, steps=2, overrides=changes))
    command = [sys.executable, "-m", "tests.flows.fakes.run_transport_flow", str(model), str(data)]
    done = subprocess.run(
        [*command, *map(json.dumps, parameters)],
        cwd=ROOT, env=lab.environment, capture_output=True, text=True, timeout=2800, check=False,
    )  # fmt: skip
    found = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("STATE ")]
    assert len(found) == len(asked), done.stdout[-3000:] + done.stderr[-3000:]
    return dict(zip(asked, found))


def check(lab: Lab, run_id: str, states: dict[str, dict[str, str]], transport: str) -> None:
    """The run ended, by this transport, with the canary on and small at every step and its memory given back."""
    assert states[run_id]["name"] == "Completed", states[run_id]
    syncs = [line["outputs"] for line in lab.ledger(run_id) if line["phase"] == "sync"]
    assert [(out["transport"], out["metrics"]["sync/canary_abs_diff"] < 1e-5) for out in syncs] == [
        (transport, True)
    ] * 3
    assert all(out["metrics"]["sync/bytes"] > 0 for out in syncs)
    rollouts = [line for line in lab.ledger(run_id) if line["phase"] == "rollout"]
    assert [line["inputs"]["policy_version"] for line in rollouts] == [0, 1]
    rows = [json.loads(line) for line in (lab.runs / run_id / "metrics.jsonl").read_text().splitlines()]
    assert all(row["train/train_rollout_logprob_abs_diff_max"] < 1e-5 for row in rows if row["step"])


def test_handles_with_the_base_sent_again_at_every_sync(lab: Lab, tmp_path: Path) -> None:
    """Also compares every tensor on both sides. No adapter goes through a file but the saves."""
    overrides = ("sync.transport=cuda_ipc", "sync.check_lora_weight_equal=true", *BASE_AGAIN)
    states = run(lab, inputs(tmp_path), {"ipc": overrides})
    check(lab, "ipc", states, "cuda_ipc")
    assert list((lab.runs / "ipc" / "sync").iterdir()) == []


@pytest.mark.slow
def test_the_transports_end_in_the_same_adapter(lab: Lab, tmp_path: Path) -> None:
    two = ("train.backend=megatron", "train.parallel.ep=2", "train.parallel.dp=2")
    asked = {
        "t-files": ("sync.transport=shared_files",),
        "t-nccl": ("sync.transport=nccl",),
        "t-ipc": ("sync.transport=cuda_ipc",),
        "t-two-ranks": ("sync.transport=cuda_ipc", *BASE_AGAIN, *two),
        "t-two-nccl": ("sync.transport=nccl", *two),
    }
    states = run(lab, inputs(tmp_path), asked)
    weights = Path("adapters") / "step-00002" / "adapter_model.safetensors"
    expected = load_file(lab.runs / "t-files" / weights)
    for run_id, overrides in asked.items():
        check(lab, run_id, states, overrides[0].partition("=")[2])
        found = load_file(lab.runs / run_id / weights)
        difference = max(float((found[name] - tensor).abs().max()) for name, tensor in expected.items())
        assert difference <= (2e-4 if "two" in run_id else 0.0), run_id
