"""Log lines about drivers, bounded: one that misbehaves for days must not fill the disk."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import logging
    from collections.abc import Mapping

    from drastate.clock import Clock

#: How many lines of one kind about one driver come at once, and how long it takes until another one
#: may. Arbitrary; a rolling update writes a handful, and one line a minute is what an operator can
#: still read.
BURST = 5
REFILL_S = 60.0

#: The same for one kind of line about all drivers together: a driver can change its name each time.
#: Arbitrary; above what a node with dozens of drivers writes when it starts.
ALL_BURST = 100
ALL_REFILL_S = 10.0

#: How many pairs of kind and driver are remembered. Arbitrary; one that is forgotten starts with a
#: fresh burst, within the bound for all.
_REMEMBERED_MAX = 1024


@dataclass(slots=True)
class _Bucket:
    """Lines that may still be written, as a token bucket."""

    size: float
    refill_s: float
    level: float
    at: float

    def has_one(self, now: float) -> bool:
        self.level = min(self.size, self.level + (now - self.at) / self.refill_s)
        self.at = now
        return self.level >= 1


class Notices:
    """Writes the first lines of a kind, then one now and then that counts those left out."""

    def __init__(self, clock: Clock) -> None:
        """Begins with full bursts.

        Args:
            clock: for the pauses.
        """
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: OrderedDict[tuple[str, str | None], _Bucket] = OrderedDict()
        self._left_out: dict[str, int] = {}

    def log(
        self,
        logger: logging.Logger,
        level: int,
        message: str,
        *,
        about: str,
        extra: Mapping[str, Any],
    ) -> None:
        """Writes a line, or counts it.

        Args:
            logger: where to.
            level: a level of `logging`.
            message: a constant sentence; with ``about`` it tells which lines are alike.
            about: the driver, or the socket while its driver is not known.
            extra: facts. A line that stands for others has ``left_out``: how many of this message
                were not written since the last one.
        """
        if not logger.isEnabledFor(level):
            return
        with self._lock:
            now = self._clock.monotonic()
            buckets = (
                self._find((message, about), BURST, REFILL_S, now),
                self._find((message, None), ALL_BURST, ALL_REFILL_S, now),
            )
            if not all(bucket.has_one(now) for bucket in buckets):
                self._left_out[message] = self._left_out.get(message, 0) + 1
                return
            for bucket in buckets:
                bucket.level -= 1
            left_out = self._left_out.pop(message, 0)
        facts = {**extra, "left_out": left_out} if left_out else extra
        logger.log(level, message, extra=facts)

    def _find(
        self, key: tuple[str, str | None], size: float, refill_s: float, now: float
    ) -> _Bucket:
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = _Bucket(size, refill_s, size, now)
        self._buckets.move_to_end(key)
        while len(self._buckets) > _REMEMBERED_MAX:
            self._buckets.popitem(last=False)
        return bucket
