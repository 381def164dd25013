"""The bring-up check in Prefect's UI: what each node has, the ports that are left out, how fast the ranks exchange."""

from collections.abc import Mapping, Sequence
from typing import Any

from prefect.artifacts import create_table_artifact

from tasks.run_directory import Run


def publish_cluster(run: Run, found: Mapping[str, Any], network: Sequence[Mapping[str, Any]] = ()) -> None:
    """A version of the run's cluster table; `found` is the survey's record, `network` the all-reduces."""
    if not run.recipe.observe.prefect_artifacts:
        return
    create_table_artifact(
        key=f"k31-cluster-{run.artifact_key}",
        table=[node_row(report, found) for report in found.get("reports", ())],
        description=cluster_summary(found, network),
    )


def node_row(report: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """One node's line."""
    cards = sorted({gpu["name"] for gpu in report["gpus"]})
    own = [problem["what"] for problem in found["problems"] if problem["node"] == report["node"]]
    return {
        "node": report["node"],
        "GPUs": f"{len(report['gpus'])} {', '.join(cards)}".strip(),
        "driver": report["driver"] or "-",
        "NCCL": report["nccl"] or "-",
        "architecture": report["architecture"],
        "image": report["image"] or "-",
        "memory GB": round(report["memory_total_bytes"] / 1e9),
        "free on the save directory GB": round((report["save_free_bytes"] or 0) / 1e9, 1),
        "checkpoint": (report["checkpoint_digest"] or "-")[:12],
        "HCA ports": ", ".join(found["infiniband"]["used"].get(report["node"], ())) or "-",
        "problems": "; ".join(own) or "none",
    }


def cluster_summary(found: Mapping[str, Any], network: Sequence[Mapping[str, Any]]) -> str:
    """The decision about the ports and the bandwidths, as Markdown."""
    lines = []
    ports = found.get("infiniband", {})
    if ports.get("excluded"):
        out = [f"{bad['device']}:{bad['port'] or '*'} of {bad['node']} ({bad['why']})" for bad in ports["excluded"]]
        lines.append(f"**Left out:** {'; '.join(out)}. Every worker gets `NCCL_IB_HCA={ports['nccl_ib_hca']}`")
    elif any(ports.get("used", {}).values()):
        lines.append("All InfiniBand ports are used")
    else:
        lines.append("No InfiniBand ports")
    lines += [
        f"All-reduce over {result['group']} ({result['ranks']} ranks, {result['bytes'] / 1e6:.0f} MB): "
        f"{result['bus_gb_per_s']:.2f} GB/s on the bus"
        for result in network
    ]
    cluster = [problem["what"] for problem in found.get("problems", ()) if problem["node"] == "cluster"]
    return "\n\n".join(lines + [f"**Problem:** {what}" for what in cluster])
