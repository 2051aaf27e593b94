"""The operator's exit for a claim whose driver is gone for good."""

from __future__ import annotations

import logging
from typing import Protocol

from drastate.clock import Clock
from drastate.errors import ClaimBusyError, ClaimHeldError, ClaimNotFoundError, UsageError
from drastate.manager import lifecycle
from drastate.manager.context import since
from drastate.model import (
    ClaimRecord,
    ClaimState,
    ClaimUID,
    DriverName,
    DriverRecord,
    Event,
    EventKind,
)

_log = logging.getLogger(__name__)


class Claims(Protocol):
    """The claims that are held or owed, as far as finding one needs them (see `Ledger`)."""

    def find(self, uid: ClaimUID) -> ClaimRecord | None:
        """The record of a claim."""

    def named(self, namespace: str, name: str) -> tuple[ClaimRecord, ...]:
        """The records with that name."""


def get_owed(claims: Claims, claim: str) -> ClaimRecord:
    """The record that an operator means.

    Args:
        claims: what is held or owed.
        claim: a UID, or "namespace/name".

    Raises:
        ClaimNotFoundError: nothing is held or owed for such a claim.
        UsageError: two claims have that name.
    """
    found = claims.find(ClaimUID(claim))
    if found is not None:
        return found
    namespace, _, name = claim.partition("/")
    named = claims.named(namespace, name)
    if len(named) > 1:
        uids = ", ".join(record.ref.uid for record in named)
        raise UsageError(f"there are several ResourceClaims {claim}; name one by its UID: {uids}")
    if not named:
        raise ClaimNotFoundError(
            f"nothing is held or owed for ResourceClaim {claim}; `drastate claims` lists what is"
            " (name one as NAMESPACE/NAME, or by its UID)"
        )
    return named[0]


def abandoned(
    record: ClaimRecord, driver: DriverName, *, reason: str, by: str, clock: Clock
) -> tuple[ClaimRecord, Event]:
    """The claim without what a driver still owes it, and what goes into the history.

    Args:
        record: the claim; its lock is held, or nobody else has the ledger.
        driver: who will never confirm.
        reason: why, for the history.
        by: who says so, for the history.
        clock: the time.

    Raises:
        UsageError: no reason, or the claim has no such driver.
        ClaimHeldError: a pod holds the claim, or the driver owes nothing.

    Source: DESIGN, "Never called, nothing owed"; k8s #129402.
    """
    if not reason.strip():
        raise UsageError("abandoning a claim needs a reason, which goes into the history")
    ref = record.ref
    known = record.drivers.get(driver)
    if known is None:
        names = ", ".join(record.drivers) or "none"
        raise UsageError(f"ResourceClaim {ref} ({ref.uid}) has no driver {driver}; it has: {names}")
    if record.active_pods:
        pods = ", ".join(f"{pod} ({pod.uid})" for pod in record.active_pods)
        raise ClaimHeldError(
            f"ResourceClaim {ref} ({ref.uid}) is held by {pods}; what a pod may be using cannot be"
            " abandoned: remove the pod and unprepare it first",
            claim=str(ref),
            claim_uid=ref.uid,
        )
    if known.state is ClaimState.UNPREPARED:
        raise ClaimHeldError(
            f"driver {driver} owes ResourceClaim {ref} ({ref.uid}) nothing; there is nothing to"
            " abandon",
            claim=str(ref),
            claim_uid=ref.uid,
        )
    now = clock.now()
    after = lifecycle.release_pods(
        lifecycle.with_driver(record, driver, lifecycle.given_up(known, now))
    )
    _log.warning(
        "a driver's duty to a claim was abandoned",
        extra={
            "claim": str(ref),
            "claim_uid": ref.uid,
            "driver": driver,
            "by": by,
            "reason": reason,
        },
    )
    pod = next(iter(record.pods.values()), None)
    detail = f"{reason.strip()} (by {by}; {_owed(known)})"
    return after, Event(EventKind.ABANDONED, now, ref, pod, driver, known.attempts, detail=detail)


def busy(record: ClaimRecord, driver: DriverName) -> ClaimBusyError:
    """The error of a claim that cannot be abandoned because its driver is being called."""
    return ClaimBusyError(
        f"ResourceClaim {record.ref} ({record.ref.uid}): driver {driver} is being called for it"
        " right now; try again",
        claim=str(record.ref),
        claim_uid=record.ref.uid,
    )


def _owed(driver: DriverRecord) -> str:
    error = f", last error: {driver.last_error}" if driver.last_error else ""
    return f"it was {driver.state} since {since(driver.since)}{error}"
