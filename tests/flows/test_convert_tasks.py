"""Both conversions of Kimi-K3's path as tasks: cached over flow runs, redone when a file is gone, refused by name."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.flows.conftest import ROOT, Lab
from tests.unit.convert.sources import change_byte, k3_copy, shard_of

pytestmark = [pytest.mark.flows, pytest.mark.slow, pytest.mark.timeout(1200)]
SCRIPT = """
import json, sys
from pathlib import Path
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.context import get_run_context
from tasks.convert import convert_for_training
from tasks.storage import STORAGE_NAME

@flow(persist_result=True, result_serializer="json", result_storage=STORAGE_NAME)
def convert_only(model_dir: str) -> str:
    ids.append(get_run_context().flow_run.id)
    return str(convert_for_training(Path(model_dir)))

if __name__ == "__main__":  # the tasks start processes of their own, which import this file
    ids = []
    state = convert_only(sys.argv[1], return_state=True)
    with get_client(sync_client=True) as client:
        runs = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=ids)))
    states = {run.task_key.split(".")[-1].split("-")[0]: run.state.name for run in runs}
    print("DONE", json.dumps([state.name, state.message, states]))
"""


def convert(lab: Lab, script: Path, source: Path) -> tuple[str, str, dict[str, str]]:
    done = subprocess.run(
        [sys.executable, script, source],
        cwd=ROOT,
        env={**lab.environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    lines = [line[5:] for line in done.stdout.splitlines() if line.startswith("DONE ")]
    assert lines, done.stdout[-2000:] + done.stderr[-2000:]
    name, message, states = json.loads(lines[0])
    return name, message or "", states


def test_conversions_are_cached_by_content(lab: Lab, tmp_path: Path) -> None:
    script = tmp_path / "convert_only.py"
    script.write_text(SCRIPT)
    source = k3_copy(tmp_path)
    assert convert(lab, script, source)[::2] == (
        "Completed",
        {"mxfp4_to_bf16": "Completed", "bf16_to_torch_dist": "Completed"},
    )
    assert (tmp_path / "k3-torch-dist" / "k31_torch_dist.json").is_file()
    again = convert(lab, script, source)
    assert again[2] == {"mxfp4_to_bf16": "Cached", "bf16_to_torch_dist": "Cached"}
    name = "language_model.model.embed_tokens.weight"
    change_byte(shard_of(source, name), name, 99)
    ended, message, _ = convert(lab, script, source)
    assert ended == "Failed" and "holds the conversion of another checkpoint" in message
