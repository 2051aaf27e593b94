"""Lets go of claims: record, commit, call, record, commit. Reads nothing but the ledger.

Neither the pod object nor the claim's source is consulted: both may be gone or changed by now
(k8s #119307, #139772).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial

from drastate import faults
from drastate.errors import (
    ClaimBusyError,
    DrastateError,
    UnprepareError,
)
from drastate.manager import lifecycle
from drastate.manager.context import (
    CallTime,
    Context,
    Failures,
    call_and_record,
    in_parallel,
    log_failure,
    merge,
    raise_failures,
    since,
)
from drastate.model import (
    CallResult,
    ClaimRecord,
    ClaimRef,
    ClaimState,
    ClaimUID,
    DriverName,
    DriverRecord,
    Event,
    EventKind,
    Operation,
    PodUID,
)

_NOBODY: frozenset[PodUID] = frozenset()


@dataclass(slots=True)
class _Plan:
    """What an intent leads to: calls by driver, and claims on which somebody else is at work."""

    calls: dict[DriverName, list[ClaimRef]] = field(default_factory=dict)
    blocked: list[ClaimUID] = field(default_factory=list)


class Unpreparer:
    """Brings claims that no pod holds any more to UNPREPARED."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def release(self, pod_uid: PodUID) -> None:
        """Lets a pod go of all its claims; nothing to do is fine.

        Raises:
            LedgerError: an intent (then no driver was called) or a result could not be written.
            ClaimBusyError: another call for the claim did not end in time.
            DriverError: one driver did not confirm; the claim stays UNPREPARING and is retried.
            UnprepareError: more than one failure.
        """
        records = self._context.ledger.of_pod(pod_uid)
        if not records:
            return
        faults.hit("unprepare.before_intent")
        refs = [record.ref for record in records]
        failures = self._run([ref.uid for ref in refs], frozenset({pod_uid}))
        pod = records[0].pods[pod_uid]
        raise_failures(
            UnprepareError,
            pod=f"{pod.namespace}/{pod.name}",
            pod_uid=pod_uid,
            claims=refs,
            failures=failures,
        )

    def finish(self, uids: Sequence[ClaimUID], leaving: Collection[PodUID] = _NOBODY) -> Failures:
        """Unprepares claims that nobody holds but the pods in ``leaving``; others are left alone.

        Raises:
            LedgerError: the intent could not be written; no driver was called.
        """
        return self._run(uids, frozenset(leaving))

    def mark(self, uids: Sequence[ClaimUID], leaving: Collection[PodUID]) -> None:
        """Records that the pods in ``leaving`` are gone, and calls no driver yet.

        Raises:
            LedgerError: nothing was recorded.
        """
        with self._context.locks.hold(uids):
            self._record_intent(uids, frozenset(leaving), lambda _, __: False)

    def call(self, driver: DriverName, uids: Sequence[ClaimUID]) -> Failures:
        """Calls one driver for claims that are UNPREPARING, as far as nobody else does.

        Raises:
            LedgerError: the intent could not be written; no driver was called.
        """

        def chosen(name: DriverName, record: DriverRecord) -> bool:
            return name == driver and record.state is ClaimState.UNPREPARING

        with self._context.locks.hold(uids):
            refs = self._record_intent(uids, _NOBODY, chosen).calls.get(driver)
        return self._call(driver, refs) if refs else {}

    # --- the intent ---

    def _run(self, uids: Sequence[ClaimUID], leaving: frozenset[PodUID]) -> Failures:
        context = self._context
        deadline = context.clock.monotonic() + context.settings.call_timeout_s
        failures: list[Failures] = []
        todo = list(uids)
        while todo:
            with context.locks.hold(todo):
                plan = self._record_intent(todo, leaving, _is_unconfirmed)
                slots = [slot for uid in plan.blocked for slot in context.in_flight.of_claim(uid)]
            failures += in_parallel(
                [partial(self._call, driver, refs) for driver, refs in plan.calls.items()]
            )
            for slot in slots:
                context.clock.wait(slot.done, deadline - context.clock.monotonic())
            todo = plan.blocked
            if todo and context.clock.monotonic() >= deadline:
                failures.append({uid: [self._busy(uid)] for uid in todo})
                break
        return merge(failures)

    def _busy(self, uid: ClaimUID) -> ClaimBusyError:
        record = self._context.ledger.find(uid)
        claim = str(record.ref) if record else uid
        return ClaimBusyError(
            f"ResourceClaim {claim} ({uid}): a driver call for it is still in flight; it is"
            " unprepared after that, try again",
            claim=claim,
            claim_uid=uid,
        )

    def _record_intent(
        self,
        uids: Sequence[ClaimUID],
        leaving: frozenset[PodUID],
        chosen: Callable[[DriverName, DriverRecord], bool],
    ) -> _Plan:
        """Lets pods go, and makes it durable which drivers are to be called; opens their slots.

        The locks are held. A claim that a pod outside ``leaving`` holds only loses its references.
        """
        context = self._context
        now = context.clock.now()
        plan = _Plan()
        changes: list[ClaimRecord] = []
        events: list[Event] = []
        for uid in uids:
            record = context.ledger.find(uid)
            if record is None:
                continue
            if any(pod.uid not in leaving for pod in record.active_pods):
                gone = [pod_uid for pod_uid in record.pods if pod_uid in leaving]
                new = lifecycle.without_pods(record, gone)
                events += [
                    Event(EventKind.POD_RELEASED, now, record.ref, record.pods[pod_uid])
                    for pod_uid in gone
                ]
            elif context.in_flight.of_claim(uid):
                plan.blocked.append(uid)
                continue
            else:
                called = [
                    name
                    for name, driver in record.drivers.items()
                    if lifecycle.owes_call(driver) and chosen(name, driver)
                ]
                new = lifecycle.unprepare_intended(record, now, called=called)
                events += _intent_events(record, new, now)
                for name in called:
                    plan.calls.setdefault(name, []).append(record.ref)
            if new != record:
                changes.append(new)
        if changes:
            # Not synced when a call follows: its result is, and covers this. Should the power fail
            # in between, the machine boots anew, and then nothing that the ledger calls PREPARED is
            # handed out before it was prepared again.
            context.commit(changes, events, durable=not plan.calls)
        for name, refs in plan.calls.items():
            for ref in refs:
                context.in_flight.begin(ref.uid, name, Operation.UNPREPARE)
        faults.hit("unprepare.after_intent")
        return plan

    # --- the calls ---

    def _call(self, driver: DriverName, refs: Sequence[ClaimRef]) -> Failures:
        return call_and_record(
            self._context,
            Operation.UNPREPARE,
            driver,
            refs,
            partial(self._record_results, driver, refs),
        )

    def _record_results(
        self,
        driver: DriverName,
        refs: Sequence[ClaimRef],
        results: Mapping[ClaimUID, CallResult],
        time: CallTime,
    ) -> Failures:
        context = self._context
        now = context.clock.now()
        failures: Failures = {}
        changes: list[ClaimRecord] = []
        events: list[Event] = []
        for ref in refs:
            record = context.ledger.find(ref.uid)
            if record is None:
                raise AssertionError(f"claim {ref.uid} left the ledger during a call")
            intended = record.drivers[driver]
            result = results[ref.uid]
            error = None if result.error is None else context.as_ours(result.error)
            after = lifecycle.unprepare_ended(
                intended,
                replace(result, error=error),
                may_land=context.losses.any_left(ref.uid, driver, at=time.started),
                now=now,
            )
            changes.append(lifecycle.release_pods(lifecycle.with_driver(record, driver, after)))
            events.append(
                Event(
                    _result_kind(after, result),
                    now,
                    ref,
                    next(iter(record.pods.values()), None),
                    driver,
                    intended.attempts,
                    time.duration_ms,
                    after.last_error,
                )
            )
            if error is not None:
                failures[ref.uid] = [_waiting(ref, driver, after, error)]
                log_failure(
                    "a driver did not unprepare a claim",
                    ref=ref,
                    driver=driver,
                    before=intended.last_error,
                    after=after,
                    duration_s=time.duration_s,
                )
        context.commit(changes, events)
        context.trusted.difference_update((ref.uid, driver) for ref in refs)
        return failures


def _is_unconfirmed(_: DriverName, record: DriverRecord) -> bool:
    return record.confirmed_at is None


def _intent_events(old: ClaimRecord, new: ClaimRecord, now: datetime) -> list[Event]:
    pod = next(iter(old.pods.values()), None)
    events = []
    if old.status is not ClaimState.UNPREPARING:
        events.append(Event(EventKind.UNPREPARE_STARTED, now, old.ref, pod))
    for name, driver in new.drivers.items():
        if driver.state is ClaimState.UNPREPARED and driver is not old.drivers[name]:
            skips = Operation.UNPREPARE in driver.skip
            why = "needs no call (skipNodeOperations)" if skips else "was never called"
            events.append(Event(EventKind.UNPREPARED, now, old.ref, pod, name, detail=why))
    return events


def _result_kind(after: DriverRecord, result: CallResult) -> EventKind:
    if result.error is not None:
        return EventKind.UNPREPARE_FAILED
    if after.state is ClaimState.UNPREPARED:
        return EventKind.UNPREPARED
    return EventKind.UNPREPARE_TO_CONFIRM


def _waiting(
    ref: ClaimRef, driver: DriverName, record: DriverRecord, error: DrastateError
) -> DrastateError:
    """The error of a driver, with what it means for the pod that waits."""
    error.message = (
        f"ResourceClaim {ref} ({ref.uid}) stays UNPREPARING, waiting for driver {driver} since"
        f" {since(record.failing_since)} (attempt {record.attempts}): {error.message}"
    )
    return error
