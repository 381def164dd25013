"""The mesh: which ranks share which part of the work. Passed to every layer as an argument; no layer reads a global
group.

Axes: `tp` splits heads, feed-forward columns and vocabulary; `cp` splits the packed sequence into equal contiguous
chunks; `dp` splits microbatches; `pp` splits layers; `ep` splits routed experts and lies inside TP x CP x DP of one
stage (expert-TP is 1, so a rank holds whole experts and works on its own slice of the tokens).
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class LayoutError(ValueError):
    """A layout that does not fit the model or the world: names the two numbers that disagree."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of the mesh, as this rank sees it."""

    size: int = 1
    rank: int = 0
    """This rank's index on the axis."""
    group: "ProcessGroup | None" = field(default=None, repr=False, compare=False)
    """None exactly when no communication is needed (size 1)."""

    def slice_of(self, total: int, what: str) -> tuple[int, int]:
        """(start, length) of this rank's equal share of `total`; `LayoutError` when it does not divide."""
        if total % self.size:
            raise LayoutError(f"{what} {total} is not divisible by the parallel size {self.size}")
        length = total // self.size
        return self.rank * length, length


@dataclass(frozen=True, slots=True)
class Mesh:
    """This rank's place on every axis, and the groups gradients are summed over."""

    tp: Axis = Axis()
    cp: Axis = Axis()
    dp: Axis = Axis()
    pp: Axis = Axis()
    ep: Axis = Axis()
    expert_dp: Axis = Axis()
    """Ranks of a stage that hold the same experts: TP x CP x DP / EP."""
    data: Axis = Axis()
    """DP x CP: ranks that hold the same TP shard and see other tokens."""
    stage: Axis = Axis()
    """TP x CP x DP: every rank of this pipeline stage."""
    model: Axis = Axis()
    """TP x PP: ranks that together hold one copy of everything but experts."""
    sequence_parallel: bool = False
    """Between the tensor-parallel regions each TP rank keeps only its slice of the tokens."""

    @property
    def token_multiple(self) -> int:
        """A packed batch must have a multiple of this many tokens (pad it with a sequence of its own)."""
        return self.cp.size * self.tp.size

    @property
    def first_stage(self) -> bool:
        """This rank embeds tokens."""
        return self.pp.rank == 0

    @property
    def last_stage(self) -> bool:
        """This rank has the final norm and the head."""
        return self.pp.rank == self.pp.size - 1


SINGLE = Mesh()
"""One process: every axis has size 1 and no collective runs."""


def stage_layers(layers: int, stages: int, first: int | None = None, last: int | None = None) -> list[range]:
    """0-based layers of every pipeline stage; the stages between `first` and `last` share the rest equally."""
    if stages == 1:
        if (first or last) is not None and (first or last) != layers:
            raise LayoutError(f"first/last stage layers {first}/{last} with one stage must be all {layers} layers")
        return [range(layers)]
    fixed = [first, *[None] * (stages - 2), last]
    rest = layers - sum(count for count in fixed if count is not None)
    free = sum(count is None for count in fixed)
    if rest < 0 or (free == 0 and rest) or (free and (rest % free or rest == 0)):
        raise LayoutError(
            f"{layers} layers do not split over {stages} stages with first {first} and last {last}: "
            f"{rest} layers remain for {free} stages"
        )
    counts = [count if count is not None else rest // free for count in fixed]
    ends = [sum(counts[: i + 1]) for i in range(stages)]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
