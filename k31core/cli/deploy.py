"""Apply what `deployments/` declares: work pool, deployments, automations; and the worker that serves them."""

import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import yaml

from k31core.cluster.home import Home, read_services
from k31core.cluster.processes import ServiceError, is_alive, record_of, start_detached, tail
from k31core.cluster.services import add_process

ROOT = Path(__file__).parents[2]
POOL = "k31"
NO_BLOCK = "none"


class DeployError(ValueError):
    """The deployments could not be applied: says what Prefect answered."""


def apply_deployments(home: Home, save_dir: Path, notify_block: str | None, progress: Callable[[str], None]) -> None:
    """Create or update the work pool (one run at a time), the deployments and the automations. Idempotent."""
    from tasks.storage import save_results_block

    progress("applying the deployments")
    save_results_block(home.results)
    ensure_pool()
    environment = {**os.environ, "K31_ROOT": str(ROOT), "K31_SAVE_DIR": str(save_dir)}
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    command += ["--prefect-file", str(ROOT / "deployments" / "prefect.yaml")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        raise DeployError(f"`prefect deploy` failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    apply_automations(ROOT / "deployments" / "automations.yaml", notify_block)


def ensure_pool() -> None:
    """The process work pool; its one slot is what all deployments share."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
    from prefect.exceptions import ObjectNotFound

    with get_client(sync_client=True) as client:
        try:
            client.read_work_pool(POOL)
            client.update_work_pool(POOL, WorkPoolUpdate(concurrency_limit=1))
        except ObjectNotFound:
            template = _process_pool_template()
            pool = WorkPoolCreate(name=POOL, type="process", base_job_template=template, concurrency_limit=1)
            client.create_work_pool(pool)


def _process_pool_template() -> dict[str, Any]:
    from prefect.workers.process import ProcessWorker

    return dict(ProcessWorker.get_default_base_job_template())


def apply_automations(path: Path, notify_block: str | None = None) -> list[str]:
    """Replace the automations that `path` declares; returns the names of those that were applied.

    notify_block: `TYPE/NAME` of a notification block that is told about ended runs, `none` to end that, None to leave
    it as it is. Raises DeployError when there is no such block.
    """
    from prefect.automations import Automation

    declared = yaml.safe_load(path.read_text(encoding="utf-8"))
    wanted = list(declared["automations"])
    if notify_block == NO_BLOCK:
        remove_automation(declared["notification"]["name"])
    elif notify_block is not None:
        wanted.append(_notification(declared["notification"], notify_block))
    for entry in wanted:
        remove_automation(entry["name"])
        Automation.model_validate(entry).create()
    return [entry["name"] for entry in wanted]


def remove_automation(name: str) -> None:
    """Delete every automation of this name."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        for automation in client.read_automations_by_name(name):
            client.delete_automation(automation.id)


def _notification(declared: Mapping[str, Any], block: str) -> dict[str, Any]:
    """The declared notification with the block's id in its actions."""
    from prefect.blocks.core import Block

    try:
        document_id = str(Block.load(block)._block_document_id)
    except ValueError as error:
        raise DeployError(
            f"--notify-block {block}: the Prefect server has no such block ({str(error).splitlines()[0]}); make it in "
            f"the UI under Blocks, or name one of `prefect block ls` as TYPE/NAME"
        ) from error
    return {**declared, "actions": [{**action, "block_document_id": document_id} for action in declared["actions"]]}


def start_worker(home: Home, progress: Callable[[str], None]) -> None:
    """Start the worker that runs deployed flow runs, unless ours is already there."""
    if any(is_alive(record) for record in read_services(home).of("worker")):
        return
    for name in crash_lost_runs():
        progress(f"run {name} lost its process: marked as crashed")
    progress("starting the deployments' worker")
    environment = {
        **os.environ,
        "PREFECT_WORKER_QUERY_SECONDS": "2",
        "PREFECT_LOGGING_LEVEL": "INFO",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "prefect", "--no-prompt", "worker", "start", "--pool", POOL, "--type", "process"]
    log = home.logs / "worker.log"
    process = start_detached(command, log, environment, cwd=ROOT)
    record = record_of(process.pid)
    if record is None:
        raise ServiceError(f"the worker ended at once:\n{tail(log)}")
    add_process(home, "worker", record)


def crash_lost_runs() -> list[str]:
    """Mark runs of our pool as crashed whose process is gone; returns their names.

    Such a run would hold the pool's only slot for ever when server and worker went down together. The automation then
    puts it back to work.
    """
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import (
        FlowRunFilter,
        FlowRunFilterState,
        FlowRunFilterStateType,
        WorkPoolFilter,
        WorkPoolFilterName,
    )
    from prefect.client.schemas.objects import StateType
    from prefect.states import Crashed

    busy = FlowRunFilterStateType(any_=[StateType.RUNNING, StateType.PENDING, StateType.CANCELLING])
    lost = []
    with get_client(sync_client=True) as client:
        runs = client.read_flow_runs(
            flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=busy)),
            work_pool_filter=WorkPoolFilter(name=WorkPoolFilterName(any_=[POOL])),
        )
        living = flow_runs_with_a_process()
        for run in runs:
            if str(run.id) not in living:
                client.set_flow_run_state(run.id, Crashed(message="its process is gone, and so was the worker"))
                lost.append(run.name)
    return lost


def flow_runs_with_a_process() -> set[str]:
    """Ids of the flow runs that a process of this user on this machine works on."""
    found = set()
    for process in psutil.process_iter(["environ"]):
        run = (process.info["environ"] or {}).get("PREFECT__FLOW_RUN_ID")
        if run is not None:
            found.add(str(uuid.UUID(run)))
    return found


def write_api_url(url: str) -> None:
    """Set PREFECT_API_URL in the active profile of the user's own Prefect home."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PREFECT_HOME", "PREFECT_API_URL")}
    command = [sys.executable, "-m", "prefect", "--no-prompt", "config", "set", f"PREFECT_API_URL={url}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode != 0:
        raise DeployError(f"`prefect config set` failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
