"""By hand (they wait): a phase without a sign of life, and a placement group that another run holds."""

import json
import subprocess
import sys

import pytest

from k31core.cli.chaos import differences
from k31core.cluster.ray_head import use_token

pytestmark = [pytest.mark.flows, pytest.mark.slow, pytest.mark.timeout(900)]


def test_silence_is_a_hang_long_before_the_phases_limit(lab) -> None:
    lab.fault("silent", "rollout", "hang 2")
    limits = ("cluster.silence_timeout_s=8", "cluster.phase_timeout_s=3600")
    whole, silent = lab.run(lab.parameters("loud", steps=3), lab.parameters("silent", steps=3, overrides=limits))
    assert (whole["name"], silent["name"]) == ("Completed", "Completed"), silent
    drawn = [int(line) for line in (lab.runs / "silent" / "drawn.log").read_text().split()]
    assert drawn == [1, 2, 2, 3], "the engine was replaced and its step drawn again"
    waited = [line["seconds"] for line in lab.ledger("silent") if line["phase"] == "rollout"]
    assert max(waited) < 600
    assert differences(lab.runs / "loud", lab.runs / "silent") == []


def test_a_placement_group_of_a_living_run_is_named(lab) -> None:
    """Another run, whose directory somebody has locked, holds every CPU of the cluster."""
    script = f"""
import ray
from pathlib import Path
from k31core.checkpoint.lock import RunLock
from k31core.cluster import actors
other = Path({str(lab.runs / "other")!r})
other.mkdir()
ray.init(address={lab.endpoints.ray_address!r}, namespace=actors.NAMESPACE, log_to_driver=False,
         _node_ip_address="127.0.0.1")
with RunLock(other / "lock"):
    actors.ensure_placement_group(f"k31:{{other}}", [{{"CPU": 4}}], spread=False, timeout_s=60)
    print("held", flush=True)
    input()
    actors.tear_down(f"{{other}}:", f"k31:{{other}}")
"""
    environment = lab.environment
    use_token(lab.home, environment)
    holder = subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdin is not None
        assert holder.stdout.readline().strip().endswith("held")
        (state,) = lab.run(lab.parameters("squeezed", overrides=("cluster.bringup_timeout_s=5",)))
        assert state["name"] == "Failed", json.dumps(state)
        assert "Ray cannot place" in state["message"]
        assert f"placement group 'k31:{lab.runs / 'other'}' (living) of another run holds GPUs" in state["message"]
        assert "k31 down" in state["message"]
    finally:
        holder.communicate("\n", timeout=120)
