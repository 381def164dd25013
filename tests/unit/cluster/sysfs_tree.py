"""Writes a folder that looks like /sys/class/infiniband."""

from pathlib import Path

GOOD = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "link_layer": "InfiniBand", "rate": "400 Gb/sec (4X NDR)"}
DOWN = {"state": "1: DOWN", "phys_state": "3: Disabled"}


def write_port(
    root: Path, device: str, port: int = 1, counters: dict[str, object] | None = None, **values: str
) -> None:
    folder = root / device / "ports" / str(port)
    (folder / "counters").mkdir(parents=True, exist_ok=True)
    for name, text in (GOOD | values).items():
        (folder / name).write_text(f"{text}\n")
    for name, count in ({"link_downed": 0, "symbol_error": 0, "link_error_recovery": 0} | (counters or {})).items():
        (folder / "counters" / name).write_text(f"{count}\n")


def write_hcas(root: Path, count: int = 12) -> Path:
    for i in range(count):
        write_port(root, f"mlx5_{i}")
    return root
