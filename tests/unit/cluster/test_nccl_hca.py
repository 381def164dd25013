"""`NCCL_IB_HCA` as NCCL reads it: each row worked out by hand from its parser's rules."""

import pytest

from k31core.cluster.nccl_hca import parse_selector, render_selector

ALL = [("mlx5_0", 1), ("mlx5_1", 1), ("mlx5_1", 2), ("mlx5_10", 1), ("mlx5_11", 1)]


@pytest.mark.parametrize(
    ("text", "selected"),
    [
        ("mlx5_1", ["mlx5_1:1", "mlx5_1:2", "mlx5_10:1", "mlx5_11:1"]),
        ("=mlx5_1", ["mlx5_1:1", "mlx5_1:2"]),
        ("=mlx5_1:2", ["mlx5_1:2"]),
        ("mlx5_1:1", ["mlx5_1:1", "mlx5_10:1", "mlx5_11:1"]),
        ("^mlx5_1", ["mlx5_0:1"]),
        ("^=mlx5_1", ["mlx5_0:1", "mlx5_10:1", "mlx5_11:1"]),
        ("^=mlx5_1:1", ["mlx5_0:1", "mlx5_1:2", "mlx5_10:1", "mlx5_11:1"]),
        ("^=mlx5_1:1,mlx5_10", ["mlx5_0:1", "mlx5_1:2", "mlx5_11:1"]),
        ("=mlx5_0,mlx5_11:1", ["mlx5_0:1", "mlx5_11:1"]),
        ("", ["mlx5_0:1", "mlx5_1:1", "mlx5_1:2", "mlx5_10:1", "mlx5_11:1"]),
        ("^", []),
    ],
)
def test_selection(text: str, selected: list[str]) -> None:
    selector = parse_selector(text)
    assert [f"{d}:{p}" for d, p in ALL if selector.selects(d, p)] == selected
    assert parse_selector(render_selector(selector)) == selector


@pytest.mark.parametrize("text", ["^=mlx5_1,=mlx5_3", "=a,^b", "mlx5_0:x"])
def test_what_nccl_would_misread_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="NCCL_IB_HCA"):
        parse_selector(text)


def test_only_32_entries_are_read() -> None:
    selector = parse_selector("=" + ",".join(f"mlx5_{i}" for i in range(40)))
    assert selector.selects("mlx5_31", 1)
    assert not selector.selects("mlx5_32", 1)
