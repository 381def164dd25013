"""NCCL's output, scanned as it is written for the lines that mean a lost link.

The lines (NCCL 2.16 to 2.30): `NET/IB: Got completion from peer ADDRESS with status=IBV_WC_RETRY_EXC_ERR(12) ... hca
mlx5_1`, older `with status=12`, older still `with error 12`; and `NET/IB : mlx5_1:1 Got async event : port error`.
"""

import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

MAX_LINE_BYTES = 16 * 1024
"""A longer line is cut: NCCL's are shorter, and a stream without newlines must not fill the memory."""
READ_BYTES = 1024 * 1024
_STATUS_NAMES = {
    4: "IBV_WC_LOC_PROT_ERR",
    5: "IBV_WC_WR_FLUSH_ERR",
    12: "IBV_WC_RETRY_EXC_ERR",
    13: "IBV_WC_RNR_RETRY_EXC_ERR",
}

_SOURCE = re.compile(r"(?P<host>[^\s:\[\]]+):(?P<pid>\d+):\d+ \[(?P<gpu>\d+)\]")
_COMPLETION = re.compile(
    r"NET/IB\S*\s?: Got completion from peer (?P<peer>\S+) with "
    r"(?:status=(?:(?P<name>IBV_WC_\w+)\((?P<named>\d+)\)|(?P<status>\d+))|error (?P<error>\d+))"
)
_HCA = re.compile(r"\bhca (?P<hca>[\w.-]+)")
_ASYNC = re.compile(
    r"NET/IB\S*\s?: (?P<hca>[\w.-]+):(?P<port>\d+) (?:Got )?(?:\w+ )?async (?:fatal )?event"
    r"(?: on \w+)?\s?: (?P<what>.+)"
)


@dataclass(frozen=True, slots=True)
class NcclFault:
    """A link fault that NCCL reported."""

    status: str
    """`IBV_WC_…` of a failed completion, or the text of an asynchronous event."""
    host: str | None
    gpu: int | None
    device: str | None
    """HCA on the reporting host; None where this NCCL does not say."""
    port: int | None
    peer: str | None
    """Address of the other side."""
    line: str

    @property
    def link_lost(self) -> bool:
        """Whether the run cannot go on over this link."""
        return self.status in ("IBV_WC_RETRY_EXC_ERR", "IBV_WC_RNR_RETRY_EXC_ERR") or "port error" in self.status

    def to_json(self) -> dict[str, Any]:
        """The record for the ledger."""
        return {"fault": "nccl", **asdict(self)}


def parse_line(line: str) -> NcclFault | None:
    """The fault in one line, or None."""
    if "NET/IB" not in line and "IBV_WC_RETRY_EXC_ERR" not in line:
        return None
    source = _SOURCE.search(line)
    host = source["host"] if source else None
    gpu = int(source["gpu"]) if source else None
    text = line.strip()[:1000]
    completion = _COMPLETION.search(line)
    if completion:
        code = int(completion["named"] or completion["status"] or completion["error"])
        status = completion["name"] or _STATUS_NAMES.get(code, f"status {code}")
        hca = _HCA.search(line)
        return NcclFault(status, host, gpu, hca["hca"] if hca else None, None, completion["peer"], text)
    event = _ASYNC.search(line)
    if event:
        return NcclFault(event["what"].strip(), host, gpu, event["hca"], int(event["port"]), None, text)
    if "IBV_WC_RETRY_EXC_ERR" in line:
        return NcclFault("IBV_WC_RETRY_EXC_ERR", host, gpu, None, None, None, text)
    return None


class NcclLogScanner:
    """Finds faults in a stream of bytes fed in any pieces; holds at most one unfinished line."""

    def __init__(self) -> None:
        self._rest = b""
        self._skipping = False

    def feed(self, data: bytes) -> list[NcclFault]:
        """Faults in the lines that `data` completes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._skipping and lines:
            lines, self._skipping = lines[1:], False
        if len(self._rest) > MAX_LINE_BYTES:
            if not self._skipping:
                lines.append(self._rest[:MAX_LINE_BYTES])
            self._rest, self._skipping = b"", True
        found = (parse_line(line[:MAX_LINE_BYTES].decode("utf-8", "replace")) for line in lines)
        return [fault for fault in found if fault is not None]

    def finish(self) -> list[NcclFault]:
        """Faults in the last line when it has no newline."""
        rest, self._rest = self._rest, b""
        fault = None if self._skipping else parse_line(rest.decode("utf-8", "replace"))
        return [] if fault is None else [fault]

    @property
    def unfinished_bytes(self) -> int:
        """Length of the line that is not complete yet."""
        return len(self._rest)


class LogFollower:
    """Reads what was added to a file since the last call; starts over when the file was replaced or cut."""

    def __init__(self, path: Path, position: tuple[int, int] | None = None) -> None:
        """position: what `position` was for an earlier reader of this file."""
        self.path = path
        self._inode, self._offset = position or (None, 0)
        self._scanner = NcclLogScanner()

    @property
    def position(self) -> tuple[int, int] | None:
        """(inode, bytes read up to the last whole line); None before the file was there."""
        return None if self._inode is None else (self._inode, self._offset - self._scanner.unfinished_bytes)

    def poll(self) -> list[NcclFault]:
        """Faults written since the last call; none while the file does not exist."""
        try:
            with self.path.open("rb") as file:
                return self._read(file)
        except FileNotFoundError:
            return []

    def _read(self, file: BinaryIO) -> list[NcclFault]:
        status = os.fstat(file.fileno())
        if self._inode != status.st_ino or status.st_size < self._offset:
            self._offset, self._inode, self._scanner = 0, status.st_ino, NcclLogScanner()
        file.seek(self._offset)
        faults: list[NcclFault] = []
        while chunk := file.read(READ_BYTES):
            self._offset += len(chunk)
            faults.extend(self._scanner.feed(chunk))
        return faults
