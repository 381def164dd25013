"""The report picture: nine panels that answer whether a run is learning, agreeing, and healthy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from k31core.report.read import RunRecord, Series

BLUE, ORANGE, GREEN, RED, GREY = "#1f5fa8", "#d9772b", "#3a8f5c", "#b8323a", "#8a8f98"
_PHASES = ("rollout", "train", "update_weights", "save")
_COLOURS = (BLUE, ORANGE, GREEN, GREY, RED, "#7d5ba6", "#b59d3a")


def draw(run: RunRecord, path: Path) -> None:
    """Write the picture as PNG. Panels whose metrics were not recorded say so."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 11), layout="constrained")
    FigureCanvasAgg(figure)
    recipe = run.resolved.recipe
    figure.suptitle(
        f"{run.run_dir.name}  ·  recipe {recipe.name}  ·  {run.steps_done} of {recipe.num_rollout} steps", fontsize=13
    )
    panels: tuple[Callable[[Any, RunRecord], None], ...] = (
        _reward, _length, _agreement, _grad_norm, _centering, _phases, _memory, _audit, _throughput,
    )  # fmt: skip
    for axis, panel in zip(figure.subplots(3, 3).flat, panels, strict=True):
        panel(axis, run)
        axis.set_xlabel("step")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(True, alpha=0.25, linewidth=0.6)
    figure.savefig(path, dpi=110)


def _line(axis: Any, series: Series, label: str, colour: str, **style: Any) -> bool:
    if series:
        marker = "o" if len(series.steps) == 1 else None
        axis.plot(series.steps, series.values, label=label, color=colour, marker=marker, linewidth=1.4, **style)
    return bool(series)


def _finish(axis: Any, title: str, drawn: bool) -> None:
    axis.set_title(title, fontsize=10.5, loc="left")
    if not drawn:
        axis.text(0.5, 0.5, "not recorded", ha="center", va="center", transform=axis.transAxes, color=GREY)
    elif axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8, frameon=False, loc="best")


def _moving_mean(series: Series, width: int = 5) -> Series:
    values = [
        sum(series.values[max(0, i - width + 1) : i + 1]) / (i + 1 - max(0, i - width + 1))
        for i in range(len(series.values))
    ]
    return Series(series.name, series.steps, tuple(values))


def _reward(axis: Any, run: RunRecord) -> None:
    reward, unfiltered = run.series("rollout/raw_reward"), run.series("rollout/raw_reward_unfiltered")
    drawn = _line(axis, reward, "raw_reward", BLUE, alpha=0.35)
    drawn |= _line(axis, _moving_mean(reward), "five-step mean", BLUE)
    if unfiltered and unfiltered.values != reward.values:
        drawn |= _line(axis, unfiltered, "raw_reward_unfiltered", ORANGE)
    evaluated = run.series(f"eval/{run.resolved.recipe.eval.name}")
    if evaluated:
        axis.plot(evaluated.steps, evaluated.values, "D", color=GREEN, label=evaluated.name)
        drawn = True
    _finish(axis, "Reward", drawn)


def _length(axis: Any, run: RunRecord) -> None:
    mean = run.series("rollout/response_len/mean")
    low, high = run.series("rollout/response_len/min"), run.series("rollout/response_len/max")
    drawn = _line(axis, mean, "mean", BLUE) | _line(
        axis, run.series("rollout/response_len/median"), "median", BLUE, linestyle=":"
    )
    if low and high and low.steps == high.steps:
        axis.fill_between(low.steps, low.values, high.values, color=BLUE, alpha=0.12, label="min to max")
    truncated = run.series("rollout/truncated_ratio")
    if truncated:
        twin = axis.twinx()
        twin.plot(truncated.steps, truncated.values, color=RED, linewidth=1.2)
        twin.set_ylabel("truncated share", color=RED, fontsize=9)
        twin.set_ylim(0, max(0.05, *truncated.values) * 1.1)
        twin.spines[["top"]].set_visible(False)
    _finish(axis, "Response length (tokens) and truncation", drawn)


def _agreement(axis: Any, run: RunRecord) -> None:
    pairs = (
        ("train/train_rollout_logprob_abs_diff", "logprob_abs_diff", BLUE),
        ("train/train_rollout_kl", "kl", ORANGE),
        ("sync/canary_abs_diff", "canary", GREEN),
    )
    drawn = False
    for name, label, colour in pairs:
        series = run.series(name)
        drawn |= _line(axis, series, label, colour)
        if any(v > 0 for v in series.values):
            axis.set_yscale("log")
    _finish(axis, "Train / rollout agreement", drawn)


def _grad_norm(axis: Any, run: RunRecord) -> None:
    series = run.series("train/grad_norm")
    drawn = _line(axis, series, "before clipping", BLUE)
    if drawn:
        axis.axhline(run.resolved.recipe.train.optimizer.clip_grad, color=GREY, linestyle="--", label="clip_grad")
        if all(v > 0 for v in series.values):
            axis.set_yscale("log")
    _finish(axis, "Gradient norm", drawn)


def _centering(axis: Any, run: RunRecord) -> None:
    rho = run.series("train/sc_tail_ratio")
    drawn = _line(axis, rho, "tail ratio rho", BLUE)
    drawn |= _line(axis, run.series("train/sc_train_head_mass"), "head mass, trainer", ORANGE)
    drawn |= _line(axis, run.series("train/sc_rollout_head_mass"), "head mass, sampler", GREEN, linestyle=":")
    if drawn:
        low, high = axis.get_ylim()
        axis.set_ylim(min(low, 0.9), max(high, 1.1))  # a ripple of 1e-3 must not look like trouble
        axis.ticklabel_format(axis="y", useOffset=False)
    warn = run.resolved.recipe.watchdog.tail_ratio_warn
    if rho and warn is not None and max(rho.values) > 0.6 * warn:
        axis.axhline(warn, color=RED, linestyle="--", label="warn")
    _finish(axis, "Score-centering health", drawn)


def _stacked(axis: Any, run: RunRecord, names: list[str], labels: list[str]) -> bool:
    base: dict[int, float] = {}
    drawn = False
    for i, (name, label) in enumerate(zip(names, labels, strict=True)):
        series = run.series(name)
        if not series:
            continue
        bottom = [base.get(step, 0.0) for step in series.steps]
        axis.bar(series.steps, series.values, bottom=bottom, width=0.9, label=label, color=_COLOURS[i % len(_COLOURS)])
        for step, value in zip(series.steps, series.values, strict=True):
            base[step] = base.get(step, 0.0) + value
        drawn = True
    return drawn


def _phases(axis: Any, run: RunRecord) -> None:
    drawn = _stacked(axis, run, [f"perf/{p}_time" for p in _PHASES], list(_PHASES))
    drawn |= _line(axis, run.series("perf/step_time"), "step", "black", linestyle=":")
    _finish(axis, "Time per phase (s)", drawn)


_UNITS = {"_mb": 1e-3, "_gb": 1.0, "_gib": 2**30 / 1e9}
"""Ends of memory metrics, in GB."""


def _memory(axis: Any, run: RunRecord) -> None:
    drawn = False
    names = [name for name in (*run.names("memory/"), *run.names("perf/")) if name.endswith(tuple(_UNITS))]
    for i, name in enumerate(names):
        unit = _UNITS["_" + name.rsplit("_", 1)[1]]
        series = run.series(name)
        scaled = Series(name, series.steps, tuple(value * unit for value in series.values))
        label = name.split("/", 1)[1].rsplit("_", 1)[0].replace("_", " ")
        drawn |= _line(axis, scaled, label, _COLOURS[i % len(_COLOURS)])
    if drawn:
        axis.set_ylim(bottom=0)
    _finish(axis, "Memory (GB)", drawn)


def _audit(axis: Any, run: RunRecord) -> None:
    names = [f"reward/{n}" for n in _AUDIT if any(run.series(f"reward/{n}").values)]
    drawn = _stacked(axis, run, names, [n.removeprefix("reward/").replace("_", " ") for n in names])
    _finish(axis, "Answers that scored 0, by reason", drawn)


_AUDIT = ("truncated", "no_box", "no_think_end", "wrong", "timed_out", "refused", "grader_error")


def _throughput(axis: Any, run: RunRecord) -> None:
    drawn = _line(axis, run.series("perf/tokens_per_gpu_per_sec"), "tokens per device and second", BLUE)
    _finish(axis, "Rollout throughput", drawn)
