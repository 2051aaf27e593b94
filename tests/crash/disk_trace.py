"""What a disk would hold after a power loss, from a system-call trace.

A write reaches the file at once and the disk at the next sync of that file. What was not synced may be
gone, be there, or be there in part and in any order.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_CALL = re.compile(r"^(\d+) +(\w+)\((\d+)<([^>]*)>(.*)$")
_RESUMED = re.compile(r"^(\d+) +<\.\.\. (\w+) resumed>")
_TEXT = re.compile(r'^, "((?:\\x[0-9a-f]{2})*)"(?:, (\d+))?(?:, (\d+))?')

#: Arguments for strace that make a trace this can read.
STRACE = (
    *("strace", "-f", "-y", "-xx", "-s", "1000000"),
    *("-e", "trace=write,pwrite64,fsync,fdatasync,ftruncate"),
)


@dataclass
class File:
    """One file: what is on the disk, and the writes that are not (offset and data)."""

    synced: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes]] = field(default_factory=list)

    def sync(self) -> None:
        for write in self.pending:
            _apply(self.synced, *write)
        self.pending = []

    def after_loss(self, keep: random.Random | None) -> bytes:
        """The content after a power loss; of the writes not synced, ``keep`` chooses and tears."""
        content = bytearray(self.synced)
        if keep is None:
            return bytes(content)
        writes = [write for write in self.pending if keep.random() < 0.5]
        keep.shuffle(writes)
        for offset, data in writes:
            torn = data if keep.random() < 0.7 else data[: keep.randrange(len(data) + 1)]
            _apply(content, offset, torn)
        return bytes(content)


def _apply(content: bytearray, offset: int, data: bytes) -> None:
    content.extend(bytes(max(0, offset + len(data) - len(content))))
    content[offset : offset + len(data)] = data


def replay(trace: str, marks_name: str) -> Iterator[tuple[list[str], dict[str, File]]]:
    """After each step that matters: the marks written so far, and the files by path.

    The same objects are given each time, in their state of then.
    """
    files: dict[str, File] = {}
    marks: list[str] = []
    syncing: dict[str, str] = {}
    for line in trace.splitlines():
        resumed = _RESUMED.match(line)
        if resumed and resumed[2] in ("fsync", "fdatasync") and resumed[1] in syncing:
            files.setdefault(syncing.pop(resumed[1]), File()).sync()
            yield marks, files
            continue
        call = _CALL.match(line)
        if call is None:
            continue
        thread, name, _, path, rest = call.groups()
        path = bytes(path, "ascii").decode("unicode_escape")
        if name in ("fsync", "fdatasync"):
            if "unfinished" in rest:
                syncing[thread] = path
                continue
            files.setdefault(path, File()).sync()
        elif name == "ftruncate":
            size = int(rest.strip(" ,").split(")")[0])
            file = files.setdefault(path, File())
            file.sync()  # harsher than life: what stood there before is gone for good
            del file.synced[size:]
        else:
            text = _TEXT.match(rest)
            assert text is not None, line[:200]
            data = bytes.fromhex(text[1].replace("\\x", ""))
            if path.endswith(marks_name):
                marks += data.decode().split()
            elif name == "pwrite64":
                assert len(data) == int(text[2])
                files.setdefault(path, File()).pending.append((int(text[3]), data))
            else:
                continue
        yield marks, files
