"""The report page: the picture, the summary and the resolved recipe in one self-contained HTML file."""

import base64
import html
import json
from pathlib import Path

from k31core.report.health import Statement
from k31core.report.read import RunRecord

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1180px;margin:2rem auto;padding:0 1rem;color:#1d232b}
h1{font-size:1.5rem} h2{font-size:1.1rem;margin-top:2rem} img{width:100%;border:1px solid #dde1e6}
table{border-collapse:collapse;width:100%} td,th{padding:.35rem .6rem;border-bottom:1px solid #e6e9ed;text-align:left}
td.n{font-variant-numeric:tabular-nums;white-space:nowrap}.good{color:#2c7a4b}.watch{color:#b8323a;font-weight:600}
small{color:#6a7079} pre{background:#f6f7f9;padding:1rem;overflow:auto;font-size:12.5px} .scroll{overflow:auto}
"""
_COLUMNS = (
    "rollout/raw_reward", "rollout/response_len/mean", "rollout/truncated_ratio", "train/loss", "train/grad_norm",
    "train/train_rollout_logprob_abs_diff", "train/train_rollout_kl", "train/sc_tail_ratio", "perf/step_time",
)  # fmt: skip


def write_page(run: RunRecord, summary: list[Statement], picture: Path, path: Path) -> None:
    """Write the HTML report. Every text from the run directory is escaped."""
    image = base64.b64encode(picture.read_bytes()).decode("ascii")
    recipe = run.resolved.recipe
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        f"<title>{html.escape(run.run_dir.name)}</title><style>{_STYLE}</style>",
        f"<h1>Run {html.escape(run.run_dir.name)}</h1>",
        f"<p>Recipe <b>{html.escape(recipe.name)}</b>: {html.escape(recipe.description)} "
        f"{run.steps_done} of {recipe.num_rollout} steps.</p>",
        _summary_table(summary),
        f'<h2>Curves</h2><img alt="Nine panels: reward, length, agreement, gradient norm, score centering, '
        f'time, memory, reward audit, throughput" src="data:image/png;base64,{image}">',
        _steps_table(run),
        "<h2>Resolved recipe</h2><pre>",
        html.escape(json.dumps(run.resolved.model_dump(mode="json"), indent=2)),
        "</pre></html>",
    ]
    path.write_text("\n".join(parts), encoding="utf-8")


def _summary_table(summary: list[Statement]) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(s.what)}</td><td class='n {s.mark}'>{html.escape(s.value)}</td>"
        f"<td><small>{html.escape(s.note)}</small></td></tr>"
        for s in summary
    )
    return f"<h2>Summary</h2><table>{rows}</table>"


def _steps_table(run: RunRecord) -> str:
    names = [name for name in _COLUMNS if run.series(name)]
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ("step", *names))
    body = []
    for row in run.rows[-20:]:
        cells = "".join(f"<td class=n>{_number(row.get(name))}</td>" for name in names)
        body.append(f"<tr><td class=n>{row['step']}</td>{cells}</tr>")
    return f"<h2>Last steps</h2><div class=scroll><table><tr>{head}</tr>{''.join(body)}</table></div>"


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "–"
