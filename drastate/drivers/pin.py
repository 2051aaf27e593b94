"""A socket file, held so that nobody can swap it between the check and the connect."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from drastate.drivers.validation import RegistrationRefusedError

if TYPE_CHECKING:
    from collections.abc import Callable

#: Connecting to it is refused: it is no socket, and there is one everywhere.
_NOWHERE = "/dev/null"


class Pin:
    """Where a channel connects to, whatever happens to the path meanwhile.

    gRPC looks its path up anew at each connect, hours after the path was checked. A pin opens the
    file itself, checks what it has opened, and gives gRPC a path that leads to exactly that file.
    While nothing good is there, that path leads to something that refuses connections.

    Thread-safe.

    Source:
        open(2), O_PATH; proc(5), /proc/pid/fd; k8s #140837 for what it protects.
    """

    def __init__(self, path: str, check: Callable[[int], None]) -> None:
        """Opens what lies at ``path`` now, if it is good.

        Args:
            path: of the socket, absolute.
            check: is handed the open file (`os.O_PATH`), raises `RegistrationRefusedError` when it
                must not be connected to.

        Raises:
            OSError: no more files can be opened.
        """
        self.path = path
        self._check = check
        self._problem: str | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._nowhere = os.open(_NOWHERE, os.O_PATH | os.O_CLOEXEC)
        try:
            # The number stays the same for life, because the channel's target cannot change; what
            # it stands for is replaced under it.
            self._fd = os.dup(self._nowhere)
        except OSError:
            os.close(self._nowhere)
            raise
        self.refresh()

    @property
    def target(self) -> str:
        """The path for gRPC."""
        return f"/proc/self/fd/{self._fd}"

    @property
    def problem(self) -> str | None:
        """Why what lies at the path is not connected to; None when it is good, or nothing is."""
        return self._problem

    def refresh(self) -> None:
        """Looks the path up anew: a driver that has restarted has made a new socket there."""
        with self._lock:
            if self._closed:
                return
            try:
                fd = os.open(self.path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                # Nothing to connect to, or no file to be had for it. What was pinned stays: it is
                # good, and if its process is dead it refuses.
                return
            try:
                self._check(fd)
                self._problem = None
                os.dup2(fd, self._fd, inheritable=False)
            except RegistrationRefusedError as refused:
                self._problem = refused.reason
                os.dup2(self._nowhere, self._fd, inheritable=False)
            finally:
                os.close(fd)

    def close(self) -> None:
        """Lets the file go; only when no channel connects to `target` any more."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._fd)
                os.close(self._nowhere)
