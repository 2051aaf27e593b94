"""The state machine of a (claim, driver): pure functions from record to record, without a clock.

    PREPARING → PREPARED → UNPREPARING → UNPREPARED      (and PREPARING again: the next epoch)

What is written *before* a call assumes the worst: a NodePrepareResources has left and got no
answer. What is written after it says what is known. So a process that dies in between leaves behind
exactly what the next one must assume, and there is nothing to repair at start.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import datetime

from drastate.model import (
    AllocatedDevice,
    CallResult,
    Claim,
    ClaimRecord,
    ClaimState,
    DriverName,
    DriverRecord,
    Operation,
    PodReference,
    PodUID,
    PreparedDevice,
)

#: Longest error text the ledger keeps. Arbitrary; a driver may answer megabytes.
ERROR_TEXT_MAX = 1024

_BEGUN = (ClaimState.PREPARING, ClaimState.PREPARED)

Skips = Mapping[DriverName, frozenset[Operation]]


def skipped_operations(claim: Claim) -> dict[DriverName, frozenset[Operation]]:
    """The drivers of an allocated claim, in allocation order, and what each needs no call for.

    An operation is skipped only when all of the driver's results skip it. Source: KEP 5945.
    """
    skips: dict[DriverName, frozenset[Operation]] = {}
    for device in claim.allocation or ():
        known = skips.get(device.driver)
        skips[device.driver] = device.skip if known is None else known & device.skip
    return skips


def allocated_at(claim: Claim, driver: DriverName) -> tuple[AllocatedDevice, ...]:
    """What a claim's allocation gives it at one driver."""
    return tuple(device for device in claim.allocation or () if device.driver == driver)


def exclusive_devices(claim: Claim) -> tuple[AllocatedDevice, ...]:
    """The devices that a prepare of the claim is about, so that no other claim may hold them."""
    skips = skipped_operations(claim)
    return tuple(
        device for device in claim.allocation or () if Operation.PREPARE not in skips[device.driver]
    )


def with_pod(record: ClaimRecord, pod: PodReference) -> ClaimRecord:
    """The claim, held by ``pod``; the same record when it already is."""
    if record.pods.get(pod.uid) == pod:
        return record
    return replace(record, pods={**record.pods, pod.uid: pod})


def with_driver(record: ClaimRecord, driver: DriverName, new: DriverRecord) -> ClaimRecord:
    """The claim, with one driver's record replaced."""
    return replace(record, drivers={**record.drivers, driver: new})


def without_uncalled(
    record: ClaimRecord, named: Collection[DriverName], now: datetime
) -> ClaimRecord:
    """The claim, done with drivers that its allocation names no more and that were never called."""
    for name, driver in record.drivers.items():
        if name not in named and not owes_call(driver) and driver.state in _BEGUN:
            record = with_driver(record, name, _unprepared(driver, now))
    return record


# --- prepare --------------------------------------------------------------------------------------


def prepare_skipped(
    old: DriverRecord | None, skip: frozenset[Operation], *, boot_id: str | None, now: datetime
) -> DriverRecord:
    """A driver that needs no NodePrepareResources: prepared at once, with no devices.

    One that was called under an earlier allocation of the claim still owes the unprepare.
    """
    if old is not None and old.called:
        kept = skip - {Operation.UNPREPARE}
        return replace(
            old, state=ClaimState.PREPARED, since=now, devices=(), boot_id=boot_id, skip=kept
        )
    return DriverRecord(ClaimState.PREPARED, now, boot_id=boot_id, skip=skip)


def prepare_intended(
    old: DriverRecord | None,
    skip: frozenset[Operation],
    allocated: tuple[AllocatedDevice, ...],
    now: datetime,
) -> DriverRecord:
    """Before NodePrepareResources: it may have left, and no answer is known.

    A driver that is prepared already (after a restart or a reboot) stays PREPARED with the devices
    it answered last, until a new answer replaces them.
    """
    if old is None or old.state in (ClaimState.UNPREPARED, ClaimState.UNPREPARING):
        # UNPREPARING gets here only when the driver has confirmed, and only the guard time of a
        # lost prepare still runs.
        old = DriverRecord(ClaimState.PREPARING, now)
    return replace(
        old,
        called=True,
        unanswered=True,
        attempts=old.attempts + 1,
        skip=skip,
        allocated=allocated,
    )


def prepare_ended(
    before: DriverRecord | None,
    intended: DriverRecord,
    result: CallResult,
    *,
    devices: tuple[PreparedDevice, ...],
    boot_id: str | None,
    may_land: bool,
    now: datetime,
) -> DriverRecord:
    """After NodePrepareResources.

    Args:
        before: the record before the intent; None when there was none.
        intended: the record the intent wrote.
        result: how the call ended.
        devices: the driver's answer.
        boot_id: the present boot.
        may_land: this call, or one not long before it, got no answer and may still take effect.
        now: the present.
    """
    if result.error is None:
        return replace(
            intended,
            state=ClaimState.PREPARED,
            since=now,
            unanswered=may_land,
            attempts=0,
            failing_since=None,
            last_error=None,
            devices=devices,
            boot_id=boot_id,
            confirmed_at=None,
        )
    owed_before = before is not None and before.called
    return replace(
        intended,
        called=owed_before or result.called,
        unanswered=may_land,
        failing_since=intended.failing_since or now,
        last_error=error_text(result.error),
    )


# --- unprepare ------------------------------------------------------------------------------------


def owes_call(driver: DriverRecord) -> bool:
    """Whether NodeUnprepareResources has to be sent before the driver is done with the claim."""
    if driver.state is ClaimState.UNPREPARED or Operation.UNPREPARE in driver.skip:
        return False
    return driver.called


def unprepare_intended(
    record: ClaimRecord, now: datetime, *, called: Collection[DriverName]
) -> ClaimRecord:
    """Before NodeUnprepareResources: no pod holds the claim, and its drivers are to let go.

    A driver that no prepare ever reached is UNPREPARED at once (kubelet: waits for it for ever,
    k8s #131957); so is one whose allocation says that it needs no such call.

    Args:
        record: the claim.
        now: the present.
        called: the drivers that are called right after this.
    """
    drivers = {}
    for name, driver in record.drivers.items():
        if driver.state is ClaimState.UNPREPARED:
            drivers[name] = driver
        elif not owes_call(driver):
            drivers[name] = _unprepared(driver, now)
        elif driver.state is ClaimState.UNPREPARING:
            drivers[name] = replace(driver, attempts=driver.attempts + (name in called))
        else:
            drivers[name] = replace(
                driver,
                state=ClaimState.UNPREPARING,
                since=now,
                attempts=int(name in called),
                failing_since=None,
                last_error=None,
            )
    pods = {uid: replace(pod, releasing=True) for uid, pod in record.pods.items()}
    return release_pods(replace(record, drivers=drivers, pods=pods))


def unprepare_ended(
    intended: DriverRecord, result: CallResult, *, may_land: bool, now: datetime
) -> DriverRecord:
    """After NodeUnprepareResources.

    A confirmation is not the last word while a lost call may still land: a prepare after it, an
    unprepare after the next prepare. The driver stays UNPREPARING until one that was asked for
    after the guard time.

    Args:
        intended: the record the intent wrote.
        result: how the call ended.
        may_land: when the call was made, an earlier one without an answer might still take effect.
        now: the present.
    """
    if result.error is not None:
        return replace(
            intended,
            failing_since=intended.failing_since or now,
            last_error=error_text(result.error),
        )
    if may_land:
        confirmed_at = intended.confirmed_at or now
        return replace(
            intended, confirmed_at=confirmed_at, attempts=0, failing_since=None, last_error=None
        )
    return _unprepared(intended, now)


def given_up(driver: DriverRecord, now: datetime) -> DriverRecord:
    """A driver that will never confirm, as an operator says: it owes nothing any more."""
    return _unprepared(driver, now)


def release_pods(record: ClaimRecord) -> ClaimRecord:
    """Lets the releasing pods go once every driver has confirmed at least once."""
    if not record.pods or not all(map(_is_released, record.drivers.values())):
        return record
    pods = {uid: pod for uid, pod in record.pods.items() if not pod.releasing}
    return record if len(pods) == len(record.pods) else replace(record, pods=pods)


def without_pods(record: ClaimRecord, gone: Collection[PodUID]) -> ClaimRecord:
    """The claim without some of its pods; others still hold it."""
    return replace(record, pods={uid: pod for uid, pod in record.pods.items() if uid not in gone})


def _is_released(driver: DriverRecord) -> bool:
    return driver.state is ClaimState.UNPREPARED or (
        driver.state is ClaimState.UNPREPARING and driver.confirmed_at is not None
    )


def _unprepared(driver: DriverRecord, now: datetime) -> DriverRecord:
    # The devices stay: a tombstone tells what the claim had.
    return replace(
        driver,
        state=ClaimState.UNPREPARED,
        since=now,
        called=False,
        unanswered=False,
        attempts=0,
        failing_since=None,
        last_error=None,
        confirmed_at=None,
    )


def error_text(error: BaseException) -> str:
    """An error's text, bounded."""
    text = str(error)
    return text if len(text) <= ERROR_TEXT_MAX else text[: ERROR_TEXT_MAX - 1] + "…"
