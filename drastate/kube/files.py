"""Reads one manifest file whole, or says why it could not be read as a whole."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, NamedTuple

from drastate.errors import InvalidManifestError
from drastate.kube.text import SIZE_MAX_BYTES

if TYPE_CHECKING:
    from pathlib import Path


class Stamp(NamedTuple):
    """Tells one state of a file from another without reading it.

    Attributes:
        modified_ns: time of the last change of the content, as the writer says.
        changed_ns: time of the last change of anything; a copying tool cannot set it back.
        size_bytes: size.
        inode: changes when a new file was moved into place.
        device: the file system.
    """

    modified_ns: int
    changed_ns: int
    size_bytes: int
    inode: int
    device: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        """The stamp for what stat said."""
        return cls(
            status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino, status.st_dev
        )


class FileText(NamedTuple):
    """The text of a file, and the state of the file that it belongs to."""

    text: str
    stamp: Stamp


def read_text(path: Path) -> FileText:
    """Reads a file of at most `SIZE_MAX_BYTES`. One that changes meanwhile is read a second time.

    Raises:
        FileNotFoundError: there is no such file (any more).
        OSError: it cannot be opened or read.
        InvalidManifestError: no regular file, too large, not UTF-8, or changing all the time.
    """
    for _ in range(2):
        # Without O_NONBLOCK, opening a named pipe would wait for its writer for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:  # noqa: PTH123 (a descriptor has no path)
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise InvalidManifestError(f"{path}: not a regular file", path=str(path))
            data = file.read(SIZE_MAX_BYTES + 1)
            if len(data) > SIZE_MAX_BYTES:
                limit = SIZE_MAX_BYTES // 1024 // 1024
                raise InvalidManifestError(
                    f"{path}: larger than {limit} MiB; split it", path=str(path)
                )
            stamp = Stamp.of(os.fstat(descriptor))
        if stamp == Stamp.of(status) and len(data) == stamp.size_bytes:
            return FileText(_decode(path, data), stamp)
    raise InvalidManifestError(
        f"{path}: changes while it is read; write to another name and move it into place",
        path=str(path),
    )


def _decode(path: Path, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        line = data.count(b"\n", 0, exc.start) + 1
        raise InvalidManifestError(f"{path}, line {line}: not UTF-8", path=str(path)) from exc
