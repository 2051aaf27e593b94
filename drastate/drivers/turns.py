"""Who may call a driver now, when the driver takes only so many calls at a time."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from drastate.clock import Clock
    from drastate.model import DriverName

#: In the limits: every driver that is not named.
OTHERS = "*"


class NoTurnError(Exception):
    """The time to wait was over, or no more turns are given. Does not leave this room.

    Attributes:
        limit: how many calls the driver takes at a time.
    """

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.limit = limit


class Turns:
    """Turns for calls, by driver; first come, first served. Thread-safe.

    Source:
        nvidia-dra #374; k8s #130700.
    """

    def __init__(self, limits: Mapping[str, int], clock: Clock) -> None:
        """Begins with nobody in line.

        Args:
            limits: calls at a time by driver, `OTHERS` for those not named; none: no limit.
            clock: for waiting.
        """
        self._limits = limits
        self._clock = clock
        self._lock = threading.Lock()
        self._lines: dict[DriverName, _Line] = {}
        self._closed = False

    @contextmanager
    def take(self, driver: DriverName, left_s: Callable[[], float]) -> Iterator[None]:
        """Holds a turn for a driver.

        Args:
            driver: who is to be called.
            left_s: how long to wait for it still; no time left is no turn.

        Raises:
            NoTurnError: there was none in time, or the turns are closed.
        """
        limit = self._limits.get(driver, self._limits.get(OTHERS))
        if limit is None:
            yield
            return
        mine = threading.Event()
        line = self._line_up(driver, limit, mine)
        try:
            if not self._clock.wait(mine, left_s()) or left_s() <= 0 or self._closed:
                raise NoTurnError(limit)
            yield
        finally:
            self._leave(driver, limit, line, mine)

    def close(self) -> None:
        """Sends home everybody who waits, now and from now on."""
        with self._lock:
            self._closed = True
            for line in self._lines.values():
                for waiter in line.waiting:
                    waiter.set()

    def _line_up(self, driver: DriverName, limit: int, mine: threading.Event) -> _Line:
        with self._lock:
            line = self._lines.setdefault(driver, _Line())
            line.waiting.append(mine)
            line.call_next(limit)
        return line

    def _leave(self, driver: DriverName, limit: int, line: _Line, mine: threading.Event) -> None:
        with self._lock:
            if mine in line.waiting:
                line.waiting.remove(mine)
            else:
                line.busy -= 1
            line.call_next(limit)
            if not line.busy and not line.waiting:
                del self._lines[driver]


class _Line:
    """Who calls one driver, and who waits. Guarded by the lock of the turns."""

    def __init__(self) -> None:
        self.busy = 0
        self.waiting: deque[threading.Event] = deque()

    def call_next(self, limit: int) -> None:
        while self.waiting and self.busy < limit:
            self.busy += 1
            self.waiting.popleft().set()
