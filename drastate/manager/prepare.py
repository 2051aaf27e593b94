"""Prepares the claims of a pod: record, commit, call, record, commit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from drastate import cdi, faults
from drastate.errors import (
    ClaimBusyError,
    DrastateError,
    DriverUnavailableError,
    LedgerError,
    PrepareError,
)
from drastate.manager import lifecycle
from drastate.manager.context import (
    Context,
    Failures,
    as_ours,
    call_and_record,
    in_parallel,
    log_failure,
    merge,
    raise_failures,
)
from drastate.manager.locks import Slot
from drastate.manager.unprepare import Unpreparer
from drastate.model import (
    CallResult,
    Claim,
    ClaimRecord,
    ClaimState,
    ClaimUID,
    DriverName,
    DriverRecord,
    Event,
    EventKind,
    Operation,
    Pod,
    PodReference,
)


@dataclass(frozen=True, slots=True)
class _Call:
    """A NodePrepareResources to make for one claim, its intent already durable."""

    claim: Claim
    before: DriverRecord | None
    intended: DriverRecord


@dataclass(slots=True)
class _Batch:
    """What one driver has to do for a pod: own calls, and others' calls to wait for."""

    calls: list[_Call] = field(default_factory=list)
    waiting: list[Claim] = field(default_factory=list)


class Preparer:
    """Brings claims to PREPARED for a pod."""

    def __init__(self, context: Context, unpreparer: Unpreparer) -> None:
        self._context = context
        self._unpreparer = unpreparer

    def prepare(self, pod: Pod, claims: Sequence[Claim]) -> None:
        """Prepares validated claims for a pod; what is prepared already is not called again.

        Raises:
            ClaimBusyError: a claim is being unprepared for an earlier pod, and that did not end.
            LedgerError: the intent (then no driver was called) or a result could not be written.
            DriverError: one driver failed.
            PrepareError: more than one failure.
        """
        faults.hit("prepare.before_intent")
        batches = self._begin(pod, claims)
        jobs = [partial(self._drive, pod, driver, batch) for driver, batch in batches.items()]
        raise_failures(
            PrepareError,
            pod=str(pod),
            pod_uid=pod.uid,
            claims=[claim.ref for claim in claims],
            failures=merge(in_parallel(jobs)),
        )

    # --- the intent ---

    def _begin(self, pod: Pod, claims: Sequence[Claim]) -> dict[DriverName, _Batch]:
        """Makes the pod's references and the calls to come durable, and opens their slots."""
        context = self._context
        deadline = context.clock.monotonic() + context.settings.call_timeout_s
        while True:
            with context.locks.hold(claim.ref.uid for claim in claims):
                ending = [claim for claim in claims if self._is_ending(claim)]
                if not ending:
                    return self._record_intent(pod, claims)
                slots = {
                    claim.ref.uid: context.in_flight.of_claim(claim.ref.uid) for claim in ending
                }
            for claim in ending:
                self._end_first(pod, claim, slots[claim.ref.uid], deadline)

    def _is_ending(self, claim: Claim) -> bool:
        """Whether the claim's unprepare for an earlier pod is under way: that is finished first.

        Devices that are about to vanish must not be handed out (k8s #140527).
        """
        context = self._context
        if any(
            slot.operation is Operation.UNPREPARE
            for slot in context.in_flight.of_claim(claim.ref.uid)
        ):
            return True
        record = context.ledger.find(claim.ref.uid)
        return record is not None and any(
            driver.state is ClaimState.UNPREPARING and driver.confirmed_at is None
            for driver in record.drivers.values()
        )

    def _end_first(self, pod: Pod, claim: Claim, slots: Sequence[Slot], deadline: float) -> None:
        context = self._context
        cause: DrastateError | None = None
        if slots:
            for slot in slots:
                context.clock.wait(slot.done, deadline - context.clock.monotonic())
        else:
            failures = self._unpreparer.finish([claim.ref.uid])
            cause = next((error for errors in failures.values() for error in errors), None)
        if cause is not None or context.clock.monotonic() >= deadline:
            reason = f": {cause.message}" if cause else ""
            raise ClaimBusyError(
                f"ResourceClaim {claim.ref} ({claim.ref.uid}) is still being unprepared for the pod"
                f" before; it can be prepared once its drivers have confirmed, try again{reason}",
                claim=str(claim.ref),
                claim_uid=claim.ref.uid,
                pod_uid=pod.uid,
            ) from cause

    def _record_intent(self, pod: Pod, claims: Sequence[Claim]) -> dict[DriverName, _Batch]:
        context = self._context
        now = context.clock.now()
        holder = PodReference(pod.uid, pod.namespace, pod.name)
        batches: dict[DriverName, _Batch] = {}
        changes: list[ClaimRecord] = []
        events: list[Event] = []
        for claim in claims:
            old = context.ledger.find(claim.ref.uid)
            record = old or ClaimRecord(claim.ref, now, {}, {})
            is_new_pod = pod.uid not in record.pods
            record = lifecycle.without_uncalled(
                lifecycle.with_pod(record, holder), lifecycle.skipped_operations(claim).keys(), now
            )
            record, called = self._plan(claim, record, batches)
            if called or is_new_pod:
                kind = EventKind.PREPARE_STARTED if called else EventKind.POD_ADDED
                detail = ", ".join(called) or None
                events.append(Event(kind, now, claim.ref, holder, detail=detail))
            if record is not old:
                changes.append(record)
        if changes:
            context.ledger.commit(changes, events)
        self._open_slots(batches)
        faults.hit("prepare.after_intent")
        return batches

    def _plan(
        self, claim: Claim, record: ClaimRecord, batches: dict[DriverName, _Batch]
    ) -> tuple[ClaimRecord, list[DriverName]]:
        """Adds what each driver of a claim has to do to ``batches``; the record it will have."""
        context = self._context
        now = context.clock.now()
        called: list[DriverName] = []
        for driver, skip in lifecycle.skipped_operations(claim).items():
            before = record.drivers.get(driver)
            if Operation.PREPARE in skip:
                if before is None or before.state is not ClaimState.PREPARED:
                    new = lifecycle.prepare_skipped(before, skip, boot_id=context.boot_id, now=now)
                    record = lifecycle.with_driver(record, driver, new)
            elif context.in_flight.find(claim.ref.uid, driver) is not None:
                batches.setdefault(driver, _Batch()).waiting.append(claim)
            elif context.needs_prepare(claim.ref.uid, driver, before):
                intended = lifecycle.prepare_intended(before, skip, now)
                record = lifecycle.with_driver(record, driver, intended)
                batch = batches.setdefault(driver, _Batch())
                batch.calls.append(_Call(claim, before, intended))
                called.append(driver)
        return record, called

    def _open_slots(self, batches: dict[DriverName, _Batch]) -> None:
        for driver, batch in batches.items():
            for call in batch.calls:
                self._context.in_flight.begin(call.claim.ref.uid, driver, Operation.PREPARE)

    # --- the calls ---

    def _drive(self, pod: Pod, driver: DriverName, batch: _Batch) -> Failures:
        """One driver's part: the own calls in one batch, then whatever others were doing."""
        context = self._context
        deadline = context.clock.monotonic() + context.settings.call_timeout_s
        failures: Failures = {}
        while batch.calls or batch.waiting:
            if batch.calls:
                failures.update(self._call(pod, driver, batch.calls))
            batch = self._join(pod, driver, batch.waiting, deadline, failures)
        return failures

    def _call(self, pod: Pod, driver: DriverName, calls: Sequence[_Call]) -> Failures:
        return call_and_record(
            self._context,
            Operation.PREPARE,
            driver,
            [call.claim.ref for call in calls],
            partial(self._record_results, pod, driver, calls),
        )

    def _record_results(
        self,
        pod: Pod,
        driver: DriverName,
        calls: Sequence[_Call],
        results: Mapping[ClaimUID, CallResult],
        duration_s: float,
    ) -> Failures:
        context = self._context
        now = context.clock.now()
        failures: Failures = {}
        changes, events, prepared = [], [], []
        for call in calls:
            ref = call.claim.ref
            result = results[ref.uid]
            record = context.ledger.find(ref.uid)
            if record is None:
                raise AssertionError(f"claim {ref.uid} left the ledger during a call")
            after = lifecycle.prepare_ended(
                call.before,
                call.intended,
                result,
                devices=cdi.with_full_request_names(
                    result.devices, call.claim.allocation or (), driver
                ),
                boot_id=context.boot_id,
                now=now,
            )
            changes.append(lifecycle.with_driver(record, driver, after))
            kind = EventKind.PREPARED if result.error is None else EventKind.PREPARE_FAILED
            events.append(
                Event(
                    kind,
                    now,
                    ref,
                    PodReference(pod.uid, pod.namespace, pod.name),
                    driver,
                    call.intended.attempts,
                    round(duration_s * 1000),
                    after.last_error,
                )
            )
            if result.error is None:
                prepared.append((ref.uid, driver))
                continue
            failures[ref.uid] = [as_ours(result.error)]
            log_failure(
                "a driver did not prepare a claim",
                ref=ref,
                driver=driver,
                before=call.before.last_error if call.before else None,
                after=after,
                duration_s=duration_s,
            )
        context.ledger.commit(changes, events)
        context.trusted.update(prepared)
        return failures

    def _join(
        self,
        pod: Pod,
        driver: DriverName,
        waiting: Sequence[Claim],
        deadline: float,
        failures: Failures,
    ) -> _Batch:
        """Waits for calls that others have in flight; what is left to call when they failed."""
        context = self._context
        if not waiting:
            return _Batch()
        for claim in waiting:
            slot = context.in_flight.find(claim.ref.uid, driver)
            if slot is not None:
                context.clock.wait(slot.done, deadline - context.clock.monotonic())
        if context.clock.monotonic() >= deadline:
            for claim in waiting:
                failures[claim.ref.uid] = [
                    DriverUnavailableError(
                        f"ResourceClaim {claim.ref}: driver {driver} has not answered the"
                        " NodePrepareResources call that another pod's prepare made for it",
                        driver=driver,
                        claim=str(claim.ref),
                        claim_uid=claim.ref.uid,
                    )
                ]
            return _Batch()
        with context.locks.hold(claim.ref.uid for claim in waiting):
            try:
                return self._take_over(pod, driver, waiting, failures)
            except LedgerError as error:
                failures.update({claim.ref.uid: [error] for claim in waiting})
                return _Batch()

    def _take_over(
        self, pod: Pod, driver: DriverName, waiting: Sequence[Claim], failures: Failures
    ) -> _Batch:
        context = self._context
        batches: dict[DriverName, _Batch] = {driver: _Batch()}
        changes: list[ClaimRecord] = []
        for claim in waiting:
            record = context.ledger.find(claim.ref.uid)
            holder = record.pods.get(pod.uid) if record else None
            if record is None or holder is None or holder.releasing:
                failures[claim.ref.uid] = [
                    ClaimBusyError(
                        f"pod {pod} let go of ResourceClaim {claim.ref} while it was prepared",
                        claim=str(claim.ref),
                        claim_uid=claim.ref.uid,
                        pod_uid=pod.uid,
                    )
                ]
                continue
            only = replace(
                claim,
                allocation=tuple(d for d in claim.allocation or () if d.driver == driver),
            )
            planned, called = self._plan(only, record, batches)
            if called:
                changes.append(planned)
        if changes:
            context.ledger.commit(changes)
        self._open_slots(batches)
        return batches[driver]
