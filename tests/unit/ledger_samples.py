"""Claims, ledgers and clocks that the tests of the ledger and of the command line share."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta
from pathlib import Path

from drastate.clock import SystemClock
from drastate.ledger.claims import ClaimLedger
from drastate.model import (
    ClaimRecord,
    ClaimRef,
    ClaimState,
    ClaimUID,
    DriverName,
    DriverRecord,
    Event,
    EventKind,
    PodReference,
    PodUID,
    PreparedDevice,
)

GPU = DriverName("gpu.example.com")
NIC = DriverName("nic.example.com")
C1 = "11111111-1111-4111-8111-111111111111"
C2 = "22222222-2222-4222-8222-222222222222"
C3 = "33333333-3333-4333-8333-333333333333"
C4 = "44444444-4444-4444-8444-444444444444"
C5 = "99999999-9999-4999-8999-999999999999"
P1 = "aaaaaaaa-0000-4000-8000-000000000001"
P2 = "aaaaaaaa-0000-4000-8000-000000000002"
T0 = datetime(2026, 3, 1, 3, 12, 7, 123456, tzinfo=UTC)


class SteeredClock(SystemClock):
    """The wall clock as the test sets it."""

    def __init__(self, now: datetime = T0, boot: str | None = "boot-1") -> None:
        self.instant = now
        self.boot = boot

    def now(self) -> datetime:
        return self.instant

    def boot_id(self) -> str | None:
        return self.boot

    def pass_by(self, **duration: float) -> None:
        self.instant += timedelta(**duration)


def ref(uid: str, name: str, namespace: str = "default") -> ClaimRef:
    return ClaimRef(ClaimUID(uid), namespace, name)


def pod(uid: str, name: str, *, releasing: bool = False) -> PodReference:
    return PodReference(PodUID(uid), "default", name, releasing)


def gpu(number: int = 0) -> PreparedDevice:
    return PreparedDevice(
        "node-a", f"gpu-{number}", None, ("gpu",), (f"gpu.example.com/gpu=gpu-{number}",)
    )


def prepared(*devices: PreparedDevice, since: datetime = T0) -> DriverRecord:
    return DriverRecord(ClaimState.PREPARED, since, called=True, devices=devices, boot_id="boot-1")


def held(uid: str, name: str, *pods: PodReference, at: datetime = T0) -> ClaimRecord:
    """A claim with one prepared GPU, held by ``pods``."""
    return ClaimRecord(
        ref(uid, name), at, {GPU: prepared(gpu())}, {each.uid: each for each in pods}
    )


def settled(record: ClaimRecord) -> ClaimRecord:
    """The same claim when nothing is held or owed any more."""
    drivers = {
        name: DriverRecord(ClaimState.UNPREPARED, driver.since, devices=driver.devices)
        for name, driver in record.drivers.items()
    }
    return ClaimRecord(record.ref, record.created_at, drivers, {})


def fill(ledger: ClaimLedger) -> None:
    """One claim of each kind, and what happened to them.

    c1 PREPARED by two drivers for two pods; c2 UNPREPARING, its pod waits for the NIC driver; c3
    UNPREPARED; c4 PREPARING, failing; and an UNPREPARED claim that had the name of c1.
    """
    both = ClaimRecord(
        ref(C1, "c1"),
        T0,
        {GPU: prepared(gpu()), NIC: prepared(PreparedDevice("node-a", "nic-0", "s1"))},
        {PodUID(P1): pod(P1, "p1"), PodUID(P2): pod(P2, "p2")},
    )
    owed = DriverRecord(
        ClaimState.UNPREPARING,
        T0 + timedelta(minutes=5),
        called=True,
        attempts=3,
        failing_since=T0 + timedelta(minutes=5),
        last_error="driver nic.example.com is not registered",
        boot_id="boot-1",
    )
    ending = ClaimRecord(
        ref(C2, "c2"), T0, {NIC: owed}, {PodUID(P2): pod(P2, "p2", releasing=True)}
    )
    failing = ClaimRecord(
        ref(C4, "c4", "lab"),
        T0,
        {
            GPU: DriverRecord(
                ClaimState.PREPARING,
                T0,
                called=True,
                unanswered=True,
                attempts=2,
                failing_since=T0,
                last_error="no GPU left\nwith \x1b[31mcolour\x1b[0m",
            )
        },
        {PodUID(P1): pod(P1, "p1")},
    )
    gone, older = held(C3, "c3", pod(P1, "p1")), held(C5, "c1", pod(P1, "p1"))
    ledger.commit(
        [gone, older], [Event(EventKind.PREPARED, T0, gone.ref, pod(P1, "p1"), GPU, 1, 12)]
    )
    ledger.commit([settled(gone), settled(older)], [Event(EventKind.UNPREPARED, T0, gone.ref)])
    ledger.commit(
        [both, ending, failing],
        [
            Event(EventKind.PREPARED, T0, both.ref, pod(P1, "p1"), GPU, 1, 12),
            Event(
                EventKind.UNPREPARE_FAILED,
                T0 + timedelta(minutes=5),
                ending.ref,
                pod(P2, "p2"),
                NIC,
                3,
                detail=owed.last_error,
            ),
        ],
    )


def write_sample(path: Path, clock: SteeredClock | None = None) -> None:
    """A closed ledger with what `fill` writes."""
    with ClaimLedger(path, node_name="node-a", clock=clock or SteeredClock()) as ledger:
        fill(ledger)


def fingerprint(folder: Path) -> dict[str, tuple[str, int, int]]:
    """Every file of a folder: its content, mode and time of last change."""
    return {
        str(path.relative_to(folder)): (
            hashlib.sha256(path.read_bytes()).hexdigest(),
            path.stat().st_mode,
            path.stat().st_mtime_ns,
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
