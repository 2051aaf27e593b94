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
from drastate.manager.admission import device_in_use
from drastate.manager.context import (
    CallTime,
    Context,
    Failures,
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
    ClaimRef,
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

#: At most this many calls at once prepare anew what a driver had prepared. Arbitrary; one claim
#: that hangs holds up its own share of them only.
_ANEW_CALLS_MAX = 8


@dataclass(frozen=True, slots=True)
class _Call:
    """A NodePrepareResources to make for one claim, its intent already durable."""

    ref: ClaimRef
    holder: PodReference
    before: DriverRecord | None
    intended: DriverRecord


@dataclass(slots=True)
class _Batch:
    """What one driver has to do for a pod: own calls, and others' calls to wait for."""

    calls: list[_Call] = field(default_factory=list)
    waiting: list[Claim] = field(default_factory=list)


@dataclass(slots=True)
class _Plan:
    """What an intent leads to: work by driver, and the claims that were refused."""

    batches: dict[DriverName, _Batch] = field(default_factory=dict)
    failures: Failures = field(default_factory=dict)

    def batch(self, driver: DriverName) -> _Batch:
        return self.batches.setdefault(driver, _Batch())


class Preparer:
    """Brings claims to PREPARED for a pod."""

    def __init__(self, context: Context, unpreparer: Unpreparer) -> None:
        self._context = context
        self._unpreparer = unpreparer

    def prepare(self, pod: Pod, claims: Sequence[Claim]) -> None:
        """Prepares validated claims for a pod; what is prepared already is not called again.

        Raises:
            ClaimBusyError: a claim is being unprepared for an earlier pod, and that did not end.
            DeviceInUseError: another claim holds a device of the claim.
            LedgerError: the intent (then no driver was called) or a result could not be written.
            DriverError: one driver failed.
            PrepareError: more than one failure.
        """
        context = self._context
        holder = PodReference(pod.uid, pod.namespace, pod.name)
        deadline = context.clock.monotonic() + context.settings.call_timeout_s
        faults.hit("prepare.before_intent")
        with context.locks.hold(claim.ref.uid for claim in claims):
            ending = [claim for claim in claims if self._is_ending(claim)]
            plan = self._record_intent(holder, [each for each in claims if each not in ending])
        raise_failures(
            PrepareError,
            pod=str(pod),
            pod_uid=pod.uid,
            claims=[claim.ref for claim in claims],
            failures=merge(
                in_parallel(
                    [
                        partial(self._carry_out, holder, plan),
                        *(partial(self._end_first, holder, each, deadline) for each in ending),
                    ]
                )
            ),
        )

    def prepare_anew(self, driver: DriverName) -> Failures:
        """Asks a driver again for everything that it had prepared for live pods.

        A failure keeps what it answered last, and the duty to unprepare it.

        Raises:
            LedgerError: the intent could not be written.

        Source: ours (`Settings.reprepare_on_register`); dra-example-driver #249.
        """
        uids = [
            record.ref.uid
            for record in self._context.ledger.all()
            if (known := record.drivers.get(driver)) and _is_in_use(record, known)
        ]
        share = -(-len(uids) // _ANEW_CALLS_MAX) or 1
        return merge(
            in_parallel(
                [
                    partial(self._prepare_anew, driver, uids[start : start + share])
                    for start in range(0, len(uids), share)
                ]
            )
        )

    def _prepare_anew(self, driver: DriverName, uids: Sequence[ClaimUID]) -> Failures:
        context = self._context
        now = context.clock.now()
        plan = _Plan()
        changes: list[ClaimRecord] = []
        with context.locks.hold(uids):
            for uid in uids:
                record = context.ledger.find(uid)
                before = record.drivers.get(driver) if record else None
                if record is None or before is None or not _is_in_use(record, before):
                    continue
                if context.in_flight.find(uid, driver) is None:
                    intended = lifecycle.prepare_intended(
                        before, before.skip, before.allocated, now
                    )
                    changes.append(lifecycle.with_driver(record, driver, intended))
                    plan.batch(driver).calls.append(
                        _Call(record.ref, record.active_pods[0], before, intended)
                    )
            if not changes:
                return {}
            context.commit(
                changes,
                [
                    Event(
                        EventKind.PREPARE_STARTED,
                        now,
                        record.ref,
                        record.active_pods[0],
                        detail=f"{driver} (it registered anew)",
                    )
                    for record in changes
                ],
            )
            self._open_slots(plan)
        return self._call(driver, plan.batch(driver).calls)

    # --- a claim that is being unprepared for an earlier pod ---

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

    def _end_first(self, holder: PodReference, claim: Claim, deadline: float) -> Failures:
        """Prepares one claim once its unprepare has ended; the pod's others do not wait for it."""
        context = self._context
        uid = claim.ref.uid
        try:
            while True:
                with context.locks.hold([uid]):
                    if not self._is_ending(claim):
                        plan = self._record_intent(holder, [claim])
                        break
                    slots = context.in_flight.of_claim(uid)
                self._end(holder, claim, slots, deadline)
        except (ClaimBusyError, LedgerError) as error:
            return {uid: [error]}
        return self._carry_out(holder, plan)

    def _end(
        self, holder: PodReference, claim: Claim, slots: Sequence[Slot], deadline: float
    ) -> None:
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
            raise self._busy(
                holder,
                claim,
                "is still being unprepared for the pod before; it can be prepared once its drivers"
                f" have confirmed, try again{reason}",
            ) from cause

    def _busy(self, holder: PodReference, claim: Claim, why: str) -> ClaimBusyError:
        return ClaimBusyError(
            f"ResourceClaim {claim.ref} ({claim.ref.uid}) {why}",
            claim=str(claim.ref),
            claim_uid=claim.ref.uid,
            pod_uid=holder.uid,
        )

    # --- the intent ---

    def _record_intent(self, holder: PodReference, claims: Sequence[Claim]) -> _Plan:
        """Makes the pod's references and the calls to come durable, and opens their slots.

        The locks are held. A claim that has to wait is refused, and nothing is recorded for it.

        Raises:
            LedgerError: nothing was recorded, and no driver is called.
        """
        context = self._context
        now = context.clock.now()
        plan = _Plan()
        changes: list[ClaimRecord] = []
        events: list[Event] = []
        for claim in claims:
            old = context.ledger.find(claim.ref.uid)
            refusal = self._refusal(holder, claim, old)
            if refusal is not None:
                plan.failures[claim.ref.uid] = [refusal]
                continue
            record = old or ClaimRecord(claim.ref, now, {}, {})
            is_new_pod = holder.uid not in record.pods
            record = lifecycle.without_uncalled(
                lifecycle.with_pod(record, holder), lifecycle.skipped_operations(claim).keys(), now
            )
            record, called = self._plan(holder, claim, record, plan)
            if called or is_new_pod:
                kind = EventKind.PREPARE_STARTED if called else EventKind.POD_ADDED
                detail = ", ".join(called) or None
                events.append(Event(kind, now, claim.ref, holder, detail=detail))
            if record is not old:
                changes.append(record)
        if changes:
            try:
                context.commit(changes, events)
            except LedgerError:
                self._give_back(changes)
                raise
        self._open_slots(plan)
        faults.hit("prepare.after_intent")
        return plan

    def _refusal(
        self, holder: PodReference, claim: Claim, record: ClaimRecord | None
    ) -> DrastateError | None:
        """Why a claim cannot be prepared right now; None, and its devices are its own: it can."""
        context = self._context
        uid = claim.ref.uid
        for driver in record.drivers if record else ():
            left_s = context.losses.left_s(uid, driver, Operation.UNPREPARE)
            if left_s > 0:
                return self._busy(
                    holder,
                    claim,
                    f"was unprepared, but a NodeUnprepareResources call before got no answer from"
                    f" driver {driver} and may still take effect; try again in {left_s:.0f} s",
                )
        conflicts = context.holds.take(uid, lifecycle.exclusive_devices(claim))
        return device_in_use(context, claim, holder.uid, conflicts[0]) if conflicts else None

    def _give_back(self, changes: Sequence[ClaimRecord]) -> None:
        """Nothing was recorded: what the claims took for it is free again."""
        for record in changes:
            known = self._context.ledger.find(record.ref.uid)
            for driver in record.drivers:
                if known is None or driver not in known.drivers:
                    self._context.holds.drop(record.ref.uid, driver)

    def _plan(
        self, holder: PodReference, claim: Claim, record: ClaimRecord, plan: _Plan
    ) -> tuple[ClaimRecord, list[DriverName]]:
        """Adds what each driver of a claim has to do to ``plan``; the record it will have."""
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
                plan.batch(driver).waiting.append(claim)
            elif context.needs_prepare(claim.ref.uid, driver, before):
                intended = lifecycle.prepare_intended(
                    before, skip, lifecycle.allocated_at(claim, driver), now
                )
                record = lifecycle.with_driver(record, driver, intended)
                plan.batch(driver).calls.append(_Call(claim.ref, holder, before, intended))
                called.append(driver)
        return record, called

    def _open_slots(self, plan: _Plan) -> None:
        for driver, batch in plan.batches.items():
            for call in batch.calls:
                self._context.in_flight.begin(call.ref.uid, driver, Operation.PREPARE)

    # --- the calls ---

    def _carry_out(self, holder: PodReference, plan: _Plan) -> Failures:
        jobs = [
            partial(self._drive, holder, driver, batch) for driver, batch in plan.batches.items()
        ]
        return merge([plan.failures, *in_parallel(jobs)])

    def _drive(self, holder: PodReference, driver: DriverName, batch: _Batch) -> Failures:
        """One driver's part: the own calls in one batch, then whatever others were doing."""
        context = self._context
        deadline = context.clock.monotonic() + context.settings.call_timeout_s
        failures: Failures = {}
        while batch.calls or batch.waiting:
            if batch.calls:
                failures.update(self._call(driver, batch.calls))
            batch = self._join(holder, driver, batch.waiting, deadline, failures)
        return failures

    def _call(self, driver: DriverName, calls: Sequence[_Call]) -> Failures:
        return call_and_record(
            self._context,
            Operation.PREPARE,
            driver,
            [call.ref for call in calls],
            partial(self._record_results, driver, calls),
        )

    def _record_results(
        self,
        driver: DriverName,
        calls: Sequence[_Call],
        results: Mapping[ClaimUID, CallResult],
        time: CallTime,
    ) -> Failures:
        context = self._context
        now = context.clock.now()
        failures: Failures = {}
        changes, events, prepared = [], [], []
        for call in calls:
            uid = call.ref.uid
            result = results[uid]
            error = None if result.error is None else context.as_ours(result.error)
            record = context.ledger.find(uid)
            if record is None:
                raise AssertionError(f"claim {uid} left the ledger during a call")
            after = lifecycle.prepare_ended(
                call.before,
                call.intended,
                replace(result, error=error),
                devices=cdi.with_full_request_names(
                    result.devices, call.intended.allocated, driver
                ),
                boot_id=context.boot_id,
                may_land=context.losses.left_s(uid, driver, Operation.PREPARE) > 0,
                now=now,
            )
            changes.append(lifecycle.with_driver(record, driver, after))
            events.append(
                Event(
                    EventKind.PREPARED if error is None else EventKind.PREPARE_FAILED,
                    now,
                    call.ref,
                    call.holder,
                    driver,
                    call.intended.attempts,
                    time.duration_ms,
                    after.last_error,
                )
            )
            if error is None:
                prepared.append((uid, driver))
                continue
            failures[uid] = [error]
            log_failure(
                "a driver did not prepare a claim",
                ref=call.ref,
                driver=driver,
                before=call.before.last_error if call.before else None,
                after=after,
                duration_s=time.duration_s,
            )
        context.commit(changes, events)
        context.trusted.update(prepared)
        context.trusted.difference_update((uid, driver) for uid in failures)
        return failures

    def _join(
        self,
        holder: PodReference,
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
                return self._take_over(holder, driver, waiting, failures)
            except LedgerError as error:
                failures.update({claim.ref.uid: [error] for claim in waiting})
                return _Batch()

    def _take_over(
        self,
        holder: PodReference,
        driver: DriverName,
        waiting: Sequence[Claim],
        failures: Failures,
    ) -> _Batch:
        context = self._context
        plan = _Plan()
        changes: list[ClaimRecord] = []
        for claim in waiting:
            record = context.ledger.find(claim.ref.uid)
            known = record.pods.get(holder.uid) if record else None
            if record is None or known is None or known.releasing:
                failures[claim.ref.uid] = [
                    ClaimBusyError(
                        f"pod {holder} let go of ResourceClaim {claim.ref} while it was prepared",
                        claim=str(claim.ref),
                        claim_uid=claim.ref.uid,
                        pod_uid=holder.uid,
                    )
                ]
                continue
            only = replace(claim, allocation=lifecycle.allocated_at(claim, driver))
            planned, called = self._plan(holder, only, record, plan)
            if called:
                changes.append(planned)
        if changes:
            context.commit(changes)
        self._open_slots(plan)
        return plan.batch(driver)


def _is_in_use(record: ClaimRecord, driver: DriverRecord) -> bool:
    """Whether a live pod uses what a driver has prepared."""
    return (
        bool(record.active_pods)
        and driver.state is ClaimState.PREPARED
        and Operation.PREPARE not in driver.skip
    )
