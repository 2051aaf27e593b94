"""Driver calls that got no answer, and may still take effect.

A prepare that lands after an unprepare leaves devices behind; an unprepare that lands after the
next prepare takes devices away from who uses them. So for a guard time after such a call, an
unprepare has to be confirmed once more, and a prepare has to wait for a lost unprepare.
"""

from __future__ import annotations

from collections.abc import Iterable

from drastate.clock import Clock
from drastate.model import ClaimRecord, ClaimState, ClaimUID, DriverName, Operation

_Key = tuple[ClaimUID, DriverName, Operation]


class Losses:
    """When which call was lost, on the monotonic clock: a wall clock that is set changes nothing.

    Entries are touched under their claim's lock.

    Source: DESIGN, "Late effects"; the kubelet forgets a call at its deadline.
    """

    def __init__(self, records: Iterable[ClaimRecord], *, clock: Clock, guard_s: float) -> None:
        """Takes what an earlier process may have had in flight for lost at this moment.

        Args:
            records: what the ledger held when it was opened.
            clock: the time.
            guard_s: how long a lost call may still take effect.
        """
        self._clock = clock
        self._guard_s = guard_s
        self._at: dict[_Key, float] = {}
        for record in records:
            for name, driver in record.drivers.items():
                if driver.unanswered:
                    self.note(record.ref.uid, name, Operation.PREPARE)
                if driver.state is ClaimState.UNPREPARING and driver.called:
                    self.note(record.ref.uid, name, Operation.UNPREPARE)

    def note(self, uid: ClaimUID, driver: DriverName, operation: Operation) -> None:
        """A call ended without an answer, now."""
        self._at[uid, driver, operation] = self._clock.monotonic()

    def forget(self, uid: ClaimUID, driver: DriverName) -> None:
        """The (claim, driver) is over."""
        for operation in Operation:
            self._at.pop((uid, driver, operation), None)

    def left_s(
        self, uid: ClaimUID, driver: DriverName, operation: Operation, *, at: float | None = None
    ) -> float:
        """For how long a lost call may still take effect; 0 when none was lost, or long ago.

        Args:
            uid: the claim.
            driver: the driver.
            operation: which call.
            at: a monotonic instant; None: now.
        """
        lost = self._at.get((uid, driver, operation))
        if lost is None:
            return 0.0
        return max(0.0, lost + self._guard_s - (self._clock.monotonic() if at is None else at))

    def any_left(self, uid: ClaimUID, driver: DriverName, *, at: float) -> bool:
        """Whether at the monotonic instant ``at`` any lost call might still have taken effect."""
        return any(self.left_s(uid, driver, each, at=at) > 0 for each in Operation)
