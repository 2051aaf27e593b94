"""What lies in the plugin registry folder: a look at a time, no events.

Polling instead of inotify: a lost event, an exhausted inotify limit and a socket that is deleted
and created between two looks are then nothing special. A look is one stat call; the folder is only
read when it has changed.
"""

from __future__ import annotations

import logging
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from drastate.drivers.validation import RegistrationRefusedError, quote

if TYPE_CHECKING:
    from pathlib import Path

    from drastate.clock import Clock

_log = logging.getLogger(__name__)

#: A folder's mtime has a granularity (a few ms, 1-2 s on some file systems), and a change within
#: the same tick as the one before does not show in it. So a folder that changed this recently is
#: read again.
_RECENT_S = 2.0

#: The folder is read at least this often, whatever its mtime says: the clock may have been set in
#: between, and not every file system keeps mtimes. Arbitrary; reading a folder takes well under a
#: millisecond.
_READ_S = 10.0


@dataclass(frozen=True, slots=True)
class Socket:
    """A socket file; another socket on the same path is another `Socket`.

    Attributes:
        path: absolute.
        mtime_ns: when it was made.
        device: number of its file system.
        inode: its number there.
    """

    path: str
    mtime_ns: int
    device: int
    inode: int

    def check_open(self, fd: int) -> None:
        """Checks that an open file is this socket, and not what was put in its place.

        Raises:
            RegistrationRefusedError: it is another file.
        """
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino) != (self.device, self.inode):
            reason = f"{quote(self.path)} is not the socket any more that was there"
            raise RegistrationRefusedError(reason)


class RegistryFolder:
    """The registry folder.

    Sub-folders, files, symbolic links and whatever begins with a dot are not looked into.
    Source: kubelet pluginwatcher (which does recurse; no driver's helper makes sub-folders).
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        """Does not look yet.

        Args:
            path: absolute.
            clock: tells whether the folder has changed recently.
        """
        self._path = path
        self._clock = clock
        self._seen: tuple[int, int, int] | None = None
        self._read_at = 0.0
        self._missing = False
        self._ignored: set[str] = set()

    def look(self) -> frozenset[Socket] | None:
        """Looks once.

        Returns:
            All sockets there, or None when nothing has changed since the look before. A folder that
            does not exist holds no sockets; one that cannot be read for another reason counts as
            unchanged.
        """
        try:
            status = self._path.stat()
            if not self._is_due(status):
                return None
            sockets = self._read()
        except (FileNotFoundError, NotADirectoryError):
            return self._note_missing()
        except OSError:
            self._warn("the plugin registry folder cannot be read; its last known state counts")
            return None
        self._missing = False
        self._seen = (status.st_dev, status.st_ino, status.st_mtime_ns)
        self._read_at = self._clock.monotonic()
        return sockets

    def _is_due(self, status: os.stat_result) -> bool:
        if self._seen != (status.st_dev, status.st_ino, status.st_mtime_ns):
            return True
        age_s = self._clock.now().timestamp() - status.st_mtime
        return age_s < _RECENT_S or self._clock.monotonic() - self._read_at > _READ_S

    def _read(self) -> frozenset[Socket]:
        sockets: set[Socket] = set()
        ignored: set[str] = set()
        with os.scandir(self._path) as entries:
            for entry in entries:
                socket = self._as_socket(entry)
                if socket is None:
                    ignored.add(entry.name)
                else:
                    sockets.add(socket)
        for name in ignored - self._ignored:
            _log.debug(
                "ignored what is no plugin socket", extra={"endpoint": str(self._path / name)}
            )
        self._ignored = ignored
        return frozenset(sockets)

    @staticmethod
    def _as_socket(entry: os.DirEntry[str]) -> Socket | None:
        if entry.name.startswith("."):
            return None
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            return None
        if not stat.S_ISSOCK(status.st_mode):
            return None
        return Socket(entry.path, status.st_mtime_ns, status.st_dev, status.st_ino)

    def _note_missing(self) -> frozenset[Socket]:
        self._warn("the plugin registry folder is gone, and with it all plugins")
        self._seen = None
        return frozenset()

    def _warn(self, message: str) -> None:
        if not self._missing:
            self._missing = True
            _log.warning(message, extra={"endpoint": str(self._path)}, exc_info=True)
