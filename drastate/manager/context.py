"""What prepare and unprepare share: the rooms they work with, locks, and working in parallel."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TypeVar

from drastate import faults
from drastate.clock import Clock
from drastate.config import Settings
from drastate.errors import (
    DrastateError,
    DriverError,
    DriverPermanentError,
    DriverRefusedError,
    InternalError,
    LedgerError,
    PodResourcesError,
)
from drastate.manager.api import Drivers, Ledger
from drastate.manager.devices import DeviceHolds
from drastate.manager.locks import ClaimLocks, InFlight
from drastate.manager.losses import Losses
from drastate.model import (
    CallResult,
    ClaimRecord,
    ClaimRef,
    ClaimState,
    ClaimUID,
    DriverName,
    DriverRecord,
    Event,
    Operation,
    PodUID,
)

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

#: A claim's failures, by claim.
Failures = dict[ClaimUID, list[DrastateError]]


@dataclass(frozen=True, slots=True)
class CallTime:
    """When a driver call was made.

    Attributes:
        started: on the monotonic clock.
        duration_s: how long it took.
    """

    started: float
    duration_s: float

    @property
    def duration_ms(self) -> int:
        """As the history stores it."""
        return round(self.duration_s * 1000)


@dataclass(frozen=True, slots=True)
class Context:
    """The rooms a manager works with, and who works on which claim.

    Attributes:
        boot_id: the boot this process runs in; None when unknown.
        preparing: pods whose prepare runs now, by how many threads: whatever a listing says, they
            live, and an embedder may list them only once they are prepared.
        trusted: what was prepared by this process: it needs no new prepare, whatever the policy.
            Touched under the claim's lock.
        losses: calls without an answer that may still take effect.
        holds: which claim holds which device.
        is_permanent: the embedder's word on errors that no repetition will mend.
    """

    ledger: Ledger
    drivers: Drivers
    settings: Settings
    clock: Clock
    boot_id: str | None
    losses: Losses
    holds: DeviceHolds
    is_permanent: Callable[[DriverError], bool] | None = None
    locks: ClaimLocks = field(default_factory=ClaimLocks)
    in_flight: InFlight = field(default_factory=InFlight)
    preparing: Counter[PodUID] = field(default_factory=Counter)
    trusted: set[tuple[ClaimUID, DriverName]] = field(default_factory=set)

    def is_current(self, uid: ClaimUID, driver: DriverName, record: DriverRecord) -> bool:
        """Whether the devices of a (claim, driver) are good to hand out in this boot."""
        if record.state is not ClaimState.PREPARED:
            return False
        if (uid, driver) in self.trusted:
            return True
        return self.boot_id is not None and record.boot_id == self.boot_id

    def needs_prepare(self, uid: ClaimUID, driver: DriverName, record: DriverRecord | None) -> bool:
        """Whether the next prepare of the claim has to call the driver.

        Source: DESIGN, "When a PREPARED claim is prepared again"; the kubelet never stores that a
        claim is prepared, so it calls again after each restart of its own.
        """
        if record is None or not self.is_current(uid, driver, record):
            return True
        return self.settings.reprepare == "restart" and (uid, driver) not in self.trusted

    def commit(
        self, changes: Sequence[ClaimRecord], events: Iterable[Event] = (), *, durable: bool = True
    ) -> None:
        """Writes to the ledger, and forgets in memory what is over by that.

        Raises:
            LedgerError: nothing was written, and nothing is forgotten.
        """
        self.ledger.commit(changes, tuple(events), durable=durable)
        for record in changes:
            uid = record.ref.uid
            for name, driver in record.drivers.items():
                if driver.state is ClaimState.UNPREPARED:
                    self.trusted.discard((uid, name))
                    self.losses.forget(uid, name)
                    self.holds.drop(uid, name)

    def as_ours(self, error: Exception) -> DrastateError:
        """An error of a call's result as one of our tree; anything else in it is a bug of ours."""
        if isinstance(error, DriverError):
            return self._as_permanent(error) if self._declared_permanent(error) else error
        if isinstance(error, DrastateError):
            return error
        bug = InternalError(f"a driver call ended with {error!r}; please report it")
        bug.__cause__ = error
        return bug

    def _declared_permanent(self, error: DriverError) -> bool:
        if self.is_permanent is None:
            return False
        try:
            return self.is_permanent(error)
        except Exception:  # noqa: BLE001 (the embedder's code; what it cannot tell is tried again)
            _log.exception("the hook for permanent errors failed; the error counts as temporary")
            return False

    @staticmethod
    def _as_permanent(error: DriverError) -> DriverPermanentError:
        permanent = DriverPermanentError(
            f"{error.message} (declared permanent: not tried again before the driver registers"
            " anew)",
            driver=error.driver,
            endpoint=error.endpoint,
            claim=error.claim,
            claim_uid=error.claim_uid,
            code=error.code,
        )
        permanent.__cause__ = error
        return permanent


def call_isolated(
    call: Callable[[DriverName, Sequence[ClaimRef]], Mapping[ClaimUID, CallResult]],
    driver: DriverName,
    refs: Sequence[ClaimRef],
) -> Mapping[ClaimUID, CallResult]:
    """One call for all claims; when the driver refuses it as a whole, one call for each.

    Drivers built on the official helper fail the whole call for one bad claim; asked one by one,
    the good ones come through.
    """
    try:
        results = call(driver, refs)
        if len(refs) > 1 and all(map(_refused_as_a_whole, results.values())):
            return {ref.uid: _later(results[ref.uid], call(driver, [ref])[ref.uid]) for ref in refs}
    except Exception as error:  # noqa: BLE001 (the room promises none; the claims must not hang)
        bug = InternalError(f"the call to driver {driver} raised {error!r}; please report it")
        bug.__cause__ = error
        return {ref.uid: CallResult(error=bug, answered=False) for ref in refs}
    return results


def call_and_record(
    context: Context,
    operation: Operation,
    driver: DriverName,
    refs: Sequence[ClaimRef],
    record: Callable[[Mapping[ClaimUID, CallResult], CallTime], Failures],
) -> Failures:
    """Calls a driver with no lock held, records how it ended, and closes the claims' slots.

    Args:
        context: the rooms.
        operation: which call; the slots of all claims are open for it.
        driver: whom to call.
        refs: the claims.
        record: writes the results to the ledger, under the locks.

    Returns:
        What failed, the ledger included: then the intent stands, which assumed the worst.
    """
    point = "prepare" if operation is Operation.PREPARE else "unprepare"
    call = context.drivers.prepare if operation is Operation.PREPARE else context.drivers.unprepare
    try:
        faults.hit(f"{point}.before_call")
        started = context.clock.monotonic()
        results = call_isolated(call, driver, refs)
        time = CallTime(started, context.clock.monotonic() - started)
        faults.hit(f"{point}.after_call")
        with context.locks.hold(ref.uid for ref in refs):
            for uid, result in results.items():
                if not result.answered:
                    context.losses.note(uid, driver, operation)
            try:
                failures = record(results, time)
            except LedgerError as error:
                failures = {ref.uid: [error] for ref in refs}
    finally:
        # Also when a signal handler raised in the call: others wait for these slots.
        with context.locks.hold(ref.uid for ref in refs):
            for ref in refs:
                context.in_flight.end(ref.uid, driver)
    faults.hit(f"{point}.after_result")
    return failures


def _later(first: CallResult, second: CallResult) -> CallResult:
    """The second of two calls for a claim; that the first was lost still counts."""
    return second if first.answered else replace(second, answered=False)


def _refused_as_a_whole(result: CallResult) -> bool:
    return isinstance(result.error, DriverRefusedError) and result.error.code is not None


def in_parallel(jobs: Sequence[Callable[[], _T]]) -> list[_T]:
    """Runs every job, the first one in this thread; their results in order.

    The other threads are daemons: one that waits for a hanging driver does not keep the process.

    Raises:
        Exception: what the first failing job raised, after all have ended.
    """
    if len(jobs) == 1:
        return [jobs[0]()]
    results: list[_T | None] = [None] * len(jobs)
    errors: list[BaseException] = []

    def run(position: int) -> None:
        try:
            results[position] = jobs[position]()
        except BaseException as error:  # noqa: BLE001 (raised again in the caller's thread)
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=(position,), name="drastate-call", daemon=True)
        for position in range(1, len(jobs))
    ]
    started = []
    here = [0] if jobs else []
    for position, thread in enumerate(threads, 1):
        try:
            thread.start()
            started.append(thread)
        except RuntimeError:
            # No more threads to be had: slower, but every job is done.
            here.append(position)
    for position in here:
        run(position)
    for thread in started:
        thread.join()
    if errors:
        raise errors[0]
    return [result for result in results if result is not None]


def merge(parts: Sequence[Failures]) -> Failures:
    """The failures of several drivers, by claim."""
    merged: Failures = {}
    for part in parts:
        for uid, errors in part.items():
            merged.setdefault(uid, []).extend(errors)
    return merged


def raise_failures(
    kind: type[PodResourcesError],
    *,
    pod: str,
    pod_uid: str,
    claims: Sequence[ClaimRef],
    failures: Failures,
) -> None:
    """Raises what went wrong for a pod, if anything: a single failure as itself.

    Raises:
        DrastateError: the failure, or a `PodResourcesError` with all of them in the claims' order.
    """
    ordered = [
        error
        for ref in claims
        for error in sorted(failures.get(ref.uid, ()), key=lambda e: getattr(e, "driver", ""))
    ]
    if not ordered:
        return
    error = ordered[0] if len(ordered) == 1 else kind(pod=pod, pod_uid=pod_uid, failures=ordered)
    error.succeeded = tuple(str(ref) for ref in claims if ref.uid not in failures)
    raise error


def log_failure(
    message: str,
    *,
    ref: ClaimRef,
    driver: DriverName,
    before: str | None,
    after: DriverRecord,
    duration_s: float,
) -> None:
    """One line at the first failure and at each change of its text, not one per attempt."""
    level = logging.DEBUG if before == after.last_error else logging.WARNING
    _log.log(
        level,
        message,
        extra={
            "claim": str(ref),
            "claim_uid": ref.uid,
            "driver": driver,
            "attempt": after.attempts,
            "error": after.last_error,
            "duration_s": round(duration_s, 3),
        },
    )


def since(instant: datetime | None) -> str:
    """An instant for an error text."""
    return instant.strftime("%Y-%m-%dT%H:%M:%SZ") if instant else "now"
