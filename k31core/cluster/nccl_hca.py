"""The grammar of `NCCL_IB_HCA`, as NCCL reads it.

Source: `ncclIbInit` and `parseStringList` of NCCL (read in 2.18 to 2.28). One optional `^` (leave out) and then one
optional `=` (exact names) hold for the whole list; entries are `device` or `device:port`, comma-separated. Without `=`
every entry is a prefix: `^mlx5_1` drops mlx5_10 too. NCCL stops reading after 32 entries.
"""

from dataclasses import dataclass

MAX_ENTRIES = 32
ANY_PORT = 0


@dataclass(frozen=True, slots=True)
class Selector:
    """A parsed value."""

    exclude: bool
    exact: bool
    entries: tuple[tuple[str, int], ...]
    """(device or prefix, port); port 0 is any."""

    def selects(self, device: str, port: int) -> bool:
        """Whether NCCL would use this port. An empty list matches every port, so `^` alone drops all."""
        matched = not self.entries or any(self._matches(entry, device, port) for entry in self.entries)
        return matched != self.exclude

    def _matches(self, entry: tuple[str, int], device: str, port: int) -> bool:
        name, wanted = entry
        same = device == name if self.exact else device.startswith(name)
        return same and wanted in (ANY_PORT, port)


def parse_selector(text: str) -> Selector:
    """Read a value of `NCCL_IB_HCA`; raises ValueError for what NCCL would silently misread."""
    rest = text.strip()
    exclude = rest.startswith("^")
    rest = rest.removeprefix("^")
    exact = rest.startswith("=")
    rest = rest.removeprefix("=")
    entries = []
    for item in filter(None, (part.strip() for part in rest.split(","))):
        name, colon, port = item.partition(":")
        if not name or name[0] in "^=":
            raise ValueError(
                f"NCCL_IB_HCA {text!r}: entry {item!r} starts with {item[0]!r}; `^` and `=` stand once, before the list"
            )
        if colon and not port.isdigit():
            raise ValueError(f"NCCL_IB_HCA {text!r}: the port of {item!r} is not a number")
        entries.append((name, int(port) if colon else ANY_PORT))
    return Selector(exclude, exact, tuple(entries[:MAX_ENTRIES]))


def render_selector(selector: Selector) -> str:
    """The text of a selector."""
    names = ",".join(name if port == ANY_PORT else f"{name}:{port}" for name, port in selector.entries)
    return f"{'^' if selector.exclude else ''}{'=' if selector.exact else ''}{names}"
