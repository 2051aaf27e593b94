"""The only source of time, boots, waiting and randomness, so that tests can steer them."""

from __future__ import annotations

import random
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Clock(Protocol):
    """Time as the other rooms see it."""

    def now(self) -> datetime:
        """The wall clock: an aware UTC datetime. It can jump; never compute a duration from it."""

    def monotonic(self) -> float:
        """Seconds that only ever grow, for durations and deadlines."""

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        """Sleeps until ``event`` is set or ``timeout_s`` passed; whether it is set."""

    def sleep(self, seconds: float) -> None:
        """Sleeps."""

    def jitter(self, low: float, high: float) -> float:
        """A random number between ``low`` and ``high``."""

    def boot_id(self) -> str | None:
        """Names the boot the machine is in; None when it cannot be told (take it for a new one)."""


class SystemClock:
    """The real thing."""

    def now(self) -> datetime:
        """See `Clock.now`."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """See `Clock.monotonic`."""
        return time.monotonic()

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        """See `Clock.wait`."""
        return event.wait(max(0.0, timeout_s))

    def sleep(self, seconds: float) -> None:
        """See `Clock.sleep`."""
        time.sleep(max(0.0, seconds))

    def jitter(self, low: float, high: float) -> float:
        """See `Clock.jitter`."""
        return random.uniform(low, high)  # noqa: S311 (spreads retries; nothing secret)

    def boot_id(self) -> str | None:
        """See `Clock.boot_id`. Source: Linux, ``/proc/sys/kernel/random/boot_id``."""
        try:
            return _BOOT_ID.read_text(encoding="ascii").strip() or None
        except (OSError, UnicodeDecodeError):
            return None
