"""Who works on which claim right now: locks per claim, and the driver calls in flight.

A claim's lock guards the decision and the ledger commit for it, never a driver call. While a call
is out, the (claim, driver) has a *slot* instead: others see it and wait for its end with no lock
held, so a driver that hangs delays only the claims that need it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from drastate.model import ClaimUID, DriverName, Operation


class ClaimLocks:
    """A lock for each claim that somebody works on; none for the others."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._locks: dict[ClaimUID, tuple[threading.Lock, int]] = {}

    @contextmanager
    def hold(self, uids: Iterable[ClaimUID]) -> Iterator[None]:
        """Holds the locks of several claims; not reentrant.

        They are taken in the order of the UIDs, so no two callers wait for each other.
        """
        ordered = sorted(set(uids))
        held: list[threading.Lock] = []
        wanted = self._want(ordered)
        try:
            for lock in wanted:
                lock.acquire()
                held.append(lock)
            yield
        finally:
            for lock in reversed(held):
                lock.release()
            self._forget(ordered)

    def _want(self, uids: list[ClaimUID]) -> list[threading.Lock]:
        locks = []
        with self._mutex:
            for uid in uids:
                lock, users = self._locks.get(uid) or (threading.Lock(), 0)
                self._locks[uid] = (lock, users + 1)
                locks.append(lock)
        return locks

    def _forget(self, uids: list[ClaimUID]) -> None:
        with self._mutex:
            for uid in uids:
                lock, users = self._locks[uid]
                if users > 1:
                    self._locks[uid] = (lock, users - 1)
                else:
                    del self._locks[uid]


class Slot:
    """A driver call in flight for one claim."""

    __slots__ = ("done", "driver", "operation")

    def __init__(self, driver: DriverName, operation: Operation) -> None:
        self.driver = driver
        self.operation = operation
        self.done = threading.Event()


class InFlight:
    """The slots of all claims. A claim's slots are touched only under its lock."""

    def __init__(self) -> None:
        self._slots: dict[ClaimUID, dict[DriverName, Slot]] = {}

    def find(self, uid: ClaimUID, driver: DriverName) -> Slot | None:
        """The call in flight for a (claim, driver)."""
        return self._slots.get(uid, {}).get(driver)

    def of_claim(self, uid: ClaimUID) -> tuple[Slot, ...]:
        """All calls in flight for a claim."""
        return tuple(self._slots.get(uid, {}).values())

    def begin(self, uid: ClaimUID, driver: DriverName, operation: Operation) -> None:
        """Opens the slot; there is none yet."""
        slots = self._slots.setdefault(uid, {})
        if driver in slots:
            raise AssertionError(f"two calls in flight for claim {uid} at {driver}")
        slots[driver] = Slot(driver, operation)

    def end(self, uid: ClaimUID, driver: DriverName) -> None:
        """Closes the slot and wakes who waits for it."""
        slots = self._slots[uid]
        slots.pop(driver).done.set()
        if not slots:
            del self._slots[uid]
