"""Group advantages: reward minus the mean of its group. No division by the standard deviation. Torch-free.

Axes: G samples of one group.
"""

import hashlib
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class AdvantageError(ValueError):
    """Rewards that have no advantage: names the group, the value seen and what to change."""


def group_advantages(rewards: Sequence[float], where: str = "group") -> NDArray[np.float64]:
    """`A_i = r_i - mean(r)` `[G]`; exactly zero when all rewards are equal.

    `where` names the group in errors. Raises `AdvantageError` for fewer than two samples (a group of one has no
    baseline) and for a reward that is not finite.
    """
    if len(rewards) < 2:
        raise AdvantageError(
            f"{where}: {len(rewards)} sample(s); a baseline needs at least 2: raise rollout.samples_per_prompt"
        )
    for i, reward in enumerate(rewards):
        if not math.isfinite(reward):
            raise AdvantageError(f"{where}: reward of sample {i} is {reward}; the grader must return a finite number")
    values = np.asarray(rewards, dtype=np.float64)
    if np.all(values == values[0]):
        return np.zeros(len(values))
    return values - math.fsum(values) / len(values)


def shuffled_advantages(advantages: NDArray[np.float64], *key: int | str) -> NDArray[np.float64]:
    """The control experiment: the same advantages, dealt to the samples of the group at random.

    `key` (run seed, step, group, ...) decides the order, so a retry shuffles the same way.
    """
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    order = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little"))).permutation(len(advantages))
    return advantages[order]
