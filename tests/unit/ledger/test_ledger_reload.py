"""What is committed is what the next process finds."""

from __future__ import annotations

import contextlib
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_samples import C1, C2, GPU, P1, P2, T0, SteeredClock, gpu, held, pod, ref, settled

from drastate.errors import DrastateError
from drastate.ledger.claims import ClaimLedger
from drastate.ledger.reader import open_ledger
from drastate.model import (
    ClaimRecord,
    ClaimState,
    DriverName,
    DriverRecord,
    Event,
    EventKind,
    Operation,
    PodReference,
    PodUID,
    PreparedDevice,
)

_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
_instants = st.datetimes(
    datetime(1970, 1, 2),  # noqa: DTZ001 (hypothesis adds the zone)
    datetime(2200, 1, 1),  # noqa: DTZ001
    timezones=st.just(UTC),
)
_devices = st.builds(
    PreparedDevice,
    pool=_text,
    device=_text,
    share_id=st.none() | _text,
    request_names=st.lists(_text, max_size=3).map(tuple),
    cdi_device_ids=st.lists(_text, max_size=3).map(tuple),
)
_drivers = st.builds(
    DriverRecord,
    state=st.sampled_from(ClaimState),
    since=_instants,
    called=st.booleans(),
    unanswered=st.booleans(),
    attempts=st.integers(0, 1_000_000),
    failing_since=st.none() | _instants,
    last_error=st.none() | _text,
    devices=st.lists(_devices, max_size=3).map(tuple),
    boot_id=st.none() | _text,
    skip=st.frozensets(st.sampled_from(Operation)),
    confirmed_at=st.none() | _instants,
)
_pods = st.builds(
    lambda number, releasing: PodReference(
        PodUID(f"pod-{number}"), "default", f"p{number}", releasing
    ),
    st.integers(0, 3),
    st.booleans(),
)


@st.composite
def _histories(draw: st.DrawFn) -> list[ClaimRecord]:
    """Versions of a few claims, in the order they are committed."""
    versions = []
    for number in draw(st.lists(st.integers(0, 2), max_size=8)):
        names = [DriverName(f"d{index}.example.com") for index in range(number)]
        drivers = {name: draw(_drivers) for name in names}
        pods = {each.uid: each for each in draw(st.lists(_pods, max_size=3))}
        record = ClaimRecord(ref(f"uid-{number}", f"c{number}"), T0, drivers, pods)
        if record.status is ClaimState.UNPREPARED:
            record = ClaimRecord(record.ref, T0, drivers, {})
        versions.append(record)
    return versions


def _by_uid(ledger: ClaimLedger) -> dict[str, ClaimRecord]:
    return {record.ref.uid: record for record in ledger.all()}


@settings(max_examples=60, deadline=None)
@given(_histories())
def test_a_second_open_finds_what_memory_showed(versions: list[ClaimRecord]) -> None:
    """Whatever sequence of records is committed, the file and the memory say the same (I6)."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.db"
        with ClaimLedger(path) as ledger:
            for version in versions:
                ledger.commit([version])
            expected = _by_uid(ledger)
            pods = {uid: {r.ref.uid for r in ledger.of_pod(uid)} for uid in ledger.pods()}
        with ClaimLedger(path) as ledger:
            assert _by_uid(ledger) == expected
            found = {uid: {r.ref.uid for r in ledger.of_pod(uid)} for uid in ledger.pods()}
            assert found == pods


def test_every_field_of_a_record_survives(ledger_file: Path) -> None:
    """A record with no default value anywhere is read back equal."""
    driver = DriverRecord(
        ClaimState.UNPREPARING,
        T0,
        called=True,
        unanswered=True,
        attempts=7,
        failing_since=T0,
        last_error="naïve \N{SNOWMAN} 'quoted' \0 end",
        devices=(PreparedDevice("pool", "device", "share", ("a", "b/c"), ("v/c=1", "v/c=2")),),
        boot_id="boot",
        skip=frozenset(Operation),
        confirmed_at=T0,
    )
    releasing = pod(P1, "p1", releasing=True)
    record = ClaimRecord(ref(C1, "c1"), T0, {GPU: driver}, {releasing.uid: releasing})
    with ClaimLedger(ledger_file) as ledger:
        ledger.commit([record])
    with ClaimLedger(ledger_file) as ledger:
        assert ledger.all() == (record,)


def test_a_shorter_answer_replaces_a_longer_one_whole(ledger_file: Path) -> None:
    """Nothing of a driver's former answer survives the next one (C02)."""
    claim = held(C1, "c1", pod(P1, "p1"))
    two = ClaimRecord(claim.ref, T0, {GPU: _with_devices(claim, gpu(0), gpu(1))}, claim.pods)
    one = ClaimRecord(claim.ref, T0, {GPU: _with_devices(claim, gpu(2))}, claim.pods)
    with ClaimLedger(ledger_file) as ledger:
        ledger.commit([two])
        ledger.commit([one])
    with open_ledger(ledger_file) as reader:
        devices = reader.claim(C1).drivers[0].devices
    assert [device.device for device in devices] == ["gpu-2"]


def _with_devices(claim: ClaimRecord, *devices: PreparedDevice) -> DriverRecord:
    old = claim.drivers[GPU]
    return DriverRecord(old.state, old.since, called=True, devices=devices, boot_id=old.boot_id)


def test_a_settled_claim_leaves_memory_and_stays_as_a_tombstone(ledger_file: Path) -> None:
    """An unprepared claim is found by nobody any more, but its row and its devices stay."""
    claim = held(C1, "c1", pod(P1, "p1"))
    with ClaimLedger(ledger_file) as ledger:
        ledger.commit([claim])
        ledger.commit([settled(claim)])
        assert ledger.find(claim.ref.uid) is None
        assert ledger.named("default", "c1") == ()
        assert not ledger.holds(PodUID(P1))
        assert ledger.pods() == ()
    with open_ledger(ledger_file) as reader:
        row = reader.claim(C1)
        assert row.status == "UNPREPARED"
        assert row.drivers[0].devices[0].device == "gpu-0"
        assert reader.pods() == ()
    with ClaimLedger(ledger_file) as ledger:
        assert ledger.all() == ()


def test_the_epoch_grows_each_time_a_claim_comes_back(ledger_file: Path) -> None:
    """A claim that is prepared again under its UID is the next epoch of the same row."""
    claim = held(C1, "c1", pod(P1, "p1"))
    clock = SteeredClock()
    for epoch in (1, 2, 3):
        with ClaimLedger(ledger_file, clock=clock) as ledger:
            clock.pass_by(hours=1)
            back = held(C1, "c1", pod(P1, "p1"), at=clock.now())
            ledger.commit([back])
            with open_ledger(ledger_file) as reader:
                row = reader.claim(C1)
                assert (row.epoch, row.created_at) == (epoch, clock.now())
            ledger.commit([settled(claim)])


def test_a_claim_that_comes_back_has_nothing_of_the_epoch_before(ledger_file: Path) -> None:
    """Drivers and devices of a tombstone go when the claim is prepared again by another driver."""
    claim = held(C1, "c1", pod(P1, "p1"))
    other = ClaimRecord(
        claim.ref, T0, {DriverName("new.example.com"): claim.drivers[GPU]}, claim.pods
    )
    with ClaimLedger(ledger_file) as ledger:
        ledger.commit([claim])
        ledger.commit([settled(claim)])
        ledger.commit([other])
    with ClaimLedger(ledger_file) as ledger:
        assert ledger.all() == (other,)


def test_claims_are_found_by_name_and_by_pod(ledger_file: Path) -> None:
    """Two claims of one name, and two claims of one pod, are both found, oldest first."""
    first, second = held(C1, "c1", pod(P1, "p1")), held(C2, "c1", pod(P1, "p1"), pod(P2, "p2"))
    with ClaimLedger(ledger_file) as ledger:
        ledger.commit([first])
        ledger.commit([second])
        assert ledger.named("default", "c1") == (first, second)
        assert ledger.of_pod(PodUID(P1)) == (first, second)
        assert ledger.of_pod(PodUID(P2)) == (second,)
        assert set(ledger.pods()) == {P1, P2}
        assert ledger.named("other", "c1") == ()


def test_a_pod_leaves_with_its_last_claim(ledger_file: Path) -> None:
    """A pod's row stays while any claim refers to it, and not longer."""
    first, second = held(C1, "c1", pod(P1, "p1")), held(C2, "c2", pod(P1, "p1"))
    with ClaimLedger(ledger_file) as ledger:
        ledger.commit([first, second])
        ledger.commit([settled(first)])
        with open_ledger(ledger_file) as reader:
            assert [claim.name for claim in reader.pods()[0].claims] == ["c2"]
        ledger.commit([settled(second)])
        with open_ledger(ledger_file) as reader:
            assert reader.pods() == ()


def test_the_history_keeps_order_and_every_field(ledger_file: Path) -> None:
    """Events come back in the order they were committed, between the open and the close."""
    event = Event(
        EventKind.PREPARE_FAILED, T0, ref(C1, "c1"), pod(P1, "p1"), GPU, 3, 250, "text\nof it"
    )
    with ClaimLedger(ledger_file, clock=SteeredClock()) as ledger:
        ledger.commit([], [event, Event(EventKind.REFUSED, T0, pod=pod(P2, "p2"))])
    with open_ledger(ledger_file) as reader:
        events = reader.events()
    assert [each.kind for each in events] == ["opened", "prepare_failed", "refused", "closed"]
    middle = events[1]
    assert (middle.at, middle.claim_uid, middle.claim) == (T0, C1, "default/c1")
    assert (middle.pod_uid, middle.pod, middle.driver) == (P1, "default/p1", GPU)
    assert (middle.attempt, middle.duration_ms, middle.detail) == (3, 250, "text\nof it")


def test_text_that_is_not_unicode_is_kept_or_refused_in_our_words(ledger_file: Path) -> None:
    """A lone surrogate, as in the name of a file, is no foreign error."""
    bad = Event(EventKind.REFUSED, T0, detail="socket /tmp/\udcff")
    with ClaimLedger(ledger_file) as ledger, contextlib.suppress(DrastateError):
        ledger.commit([], [bad])


def test_text_that_cannot_be_stored_breaks_no_later_commit(ledger_file: Path) -> None:
    """After a commit that could not be encoded the next one works."""
    bad = Event(EventKind.REFUSED, T0, detail="socket /tmp/\udcff")
    with ClaimLedger(ledger_file) as ledger:
        with contextlib.suppress(ValueError, DrastateError):
            ledger.commit([], [bad])
        ledger.commit([held(C1, "c1", pod(P1, "p1"))])
    with ClaimLedger(ledger_file) as ledger:
        assert [record.ref.uid for record in ledger.all()] == [C1]


@pytest.mark.parametrize("boot", ["boot-7", None])
def test_a_ledger_notes_node_boot_open_and_stop(ledger_file: Path, boot: str | None) -> None:
    """The ledger's own row says whose it is, and whether it was closed in good order."""
    clock = SteeredClock(boot=boot)
    with ClaimLedger(ledger_file, node_name="node-a", clock=clock):
        with open_ledger(ledger_file) as reader:
            info = reader.info()
        assert info.in_use
        assert info.last_clean_stop is None
        assert not info.was_closed_cleanly
        clock.pass_by(minutes=1)
    with open_ledger(ledger_file) as reader:
        after = reader.info()
    assert (after.node_name, after.boot_id, after.uuid) == ("node-a", boot, info.uuid)
    assert after.was_closed_cleanly
    assert not after.in_use


def test_closing_twice_is_closing_once(ledger_file: Path) -> None:
    """A second close does nothing."""
    ledger = ClaimLedger(ledger_file)
    ledger.close()
    ledger.close()
    with open_ledger(ledger_file) as reader:
        assert [event.kind for event in reader.events()] == ["opened", "closed"]
