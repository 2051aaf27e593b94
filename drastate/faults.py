"""Named crash points. They do nothing unless a test arms them.

A crash point is a place where the death of the process must be survivable; `tests/crash` kills the
process at each of them and checks what the next process does. `hit` is one dictionary look-up while
nothing is armed.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from types import MappingProxyType

#: Every crash point, and what has and has not happened when the process dies there.
POINTS: Mapping[str, str] = MappingProxyType(
    {
        "prepare.before_intent": "validated; nothing recorded, nothing called",
        "prepare.after_intent": "the claim, its drivers and the pod are durable; no call has left",
        "prepare.before_call": "the next statement sends NodePrepareResources",
        "prepare.after_call": "the driver has answered; the answer is not recorded",
        "prepare.after_result": "the answer is durable; the caller does not know yet",
        "unprepare.before_intent": "asked to let go; nothing recorded, nothing called",
        "unprepare.after_intent": "UNPREPARING is recorded; no call has left",
        "unprepare.before_call": "the next statement sends NodeUnprepareResources",
        "unprepare.after_call": "the driver has confirmed; that is not recorded",
        "unprepare.after_result": "the confirmation is durable; the caller does not know yet",
        "ledger.before_commit": "all statements of a transaction are done; it is not committed",
        "ledger.after_commit": "committed and synced; memory does not show it yet",
    }
)

#: Arms one point in a child process: ``name`` or ``name:N`` (die at the N-th hit). Read by the
#: command line alone.
ENVIRONMENT_VARIABLE = "DRASTATE_CRASH_AT"

_armed: dict[str, Callable[[], None]] = {}


def hit(point: str) -> None:
    """Runs what is armed at ``point``, if anything."""
    if _armed and (action := _armed.get(point)) is not None:
        action()


def arm(point: str, action: Callable[[], None]) -> None:
    """Makes `hit` of ``point`` run ``action``.

    Raises:
        KeyError: there is no such point.
    """
    if point not in POINTS:
        message = f"there is no crash point {point!r}; there are: {', '.join(sorted(POINTS))}"
        raise KeyError(message)
    _armed[point] = action


def disarm() -> None:
    """Makes every point do nothing again."""
    _armed.clear()


def arm_kill(point: str, at_hit: int = 1) -> None:
    """Makes the process kill itself with SIGKILL at the ``at_hit``-th hit of ``point``."""
    hits = 0

    def die() -> None:
        nonlocal hits
        hits += 1
        if hits >= at_hit:
            os.kill(os.getpid(), signal.SIGKILL)

    arm(point, die)


def arm_from_environment() -> None:
    """Arms what `ENVIRONMENT_VARIABLE` names; does nothing when it is not set.

    Raises:
        KeyError: it names no crash point.
        ValueError: its count is not a number.
    """
    value = os.environ.get(ENVIRONMENT_VARIABLE)
    if not value:
        return
    point, _, count = value.partition(":")
    arm_kill(point, int(count or "1"))
