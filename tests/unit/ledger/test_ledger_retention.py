"""The history stays bounded, whatever the clock does, and what is held or owed is never touched."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import pytest
from ledger_samples import C1, P1, T0, SteeredClock, held, pod, settled

from drastate.ledger.claims import ClaimLedger
from drastate.ledger.engine import raw_connection
from drastate.ledger.reader import open_ledger
from drastate.model import Event, EventKind

_NO_LIMIT = 1_000_000


def _tombstone(ledger: ClaimLedger, uid: str) -> None:
    claim = held(uid, uid, pod(P1, "p1"))
    ledger.commit([claim])
    ledger.commit([settled(claim)])


def _names(path: Path) -> list[str]:
    with open_ledger(path) as reader:
        return [claim.name for claim in reader.claims()]


def _prune(ledger: ClaimLedger, **limits: float) -> int:
    removed = 0
    settings = {"tombstone_days": 14.0, "tombstones_max": _NO_LIMIT, "events_max": _NO_LIMIT}
    settings.update(limits)
    while batch := ledger.prune(**settings):  # type: ignore[arg-type]
        removed += batch
    return removed


def test_old_tombstones_go_by_age(ledger_file: Path) -> None:
    """A tombstone goes when it is older than the limit, and not a moment before."""
    clock = SteeredClock()
    with ClaimLedger(ledger_file, clock=clock) as ledger:
        _tombstone(ledger, "old")
        clock.pass_by(days=10)
        _tombstone(ledger, "young")
        clock.pass_by(days=4)
        assert _prune(ledger) == 0
        clock.pass_by(seconds=1)
        assert _prune(ledger) == 1
    assert _names(ledger_file) == ["young"]


def test_too_many_tombstones_go_oldest_first(ledger_file: Path) -> None:
    """Over the number that may stay, the oldest go, with their drivers and devices."""
    clock = SteeredClock()
    with ClaimLedger(ledger_file, clock=clock) as ledger:
        for number in range(6):
            clock.pass_by(minutes=1)
            _tombstone(ledger, f"c{number}")
        assert _prune(ledger, tombstones_max=2) == 4
        raw = raw_connection(ledger._commits._connection)
        assert raw.execute("SELECT count(*) FROM devices").fetchone() == (2,)
    assert _names(ledger_file) == ["c4", "c5"]


def test_what_is_held_or_owed_never_goes(ledger_file: Path) -> None:
    """However old a claim is, only UNPREPARED ones are history (I2)."""
    clock = SteeredClock()
    with ClaimLedger(ledger_file, clock=clock) as ledger:
        ledger.commit([held(C1, "c1", pod(P1, "p1"))])
        clock.pass_by(days=4000)
        assert _prune(ledger, tombstone_days=0.001, tombstones_max=1) == 0
    assert _names(ledger_file) == ["c1"]


def test_the_oldest_events_go_and_ids_are_not_used_again(ledger_file: Path) -> None:
    """The newest stay, in order, and a reader that follows by id misses nothing."""
    with ClaimLedger(ledger_file) as ledger:
        ledger.commit([], [Event(EventKind.REFUSED, T0, detail=str(n)) for n in range(20)])
        assert _prune(ledger, events_max=5) == 16
        with open_ledger(ledger_file) as reader:
            events = reader.events()
        assert [event.detail for event in events] == ["15", "16", "17", "18", "19"]
        ledger.commit([], [Event(EventKind.REFUSED, T0, detail="next")])
        with open_ledger(ledger_file) as reader:
            assert reader.events()[-1].id == events[-1].id + 1


@pytest.mark.parametrize("jump", [timedelta(days=365), timedelta(days=-365)])
def test_a_clock_that_jumps_neither_empties_nor_floods_the_history(
    ledger_file: Path, jump: timedelta
) -> None:
    """A year forth or back: the count holds, and what is of the future goes in its turn (C100)."""
    clock = SteeredClock()
    with ClaimLedger(ledger_file, clock=clock) as ledger:
        for number in range(4):
            _tombstone(ledger, f"before-{number}")
        clock.instant += jump
        for number in range(4):
            _tombstone(ledger, f"after-{number}")
        _prune(ledger, tombstones_max=4)
        names = _names(ledger_file)
        assert len(names) == 4
        clock.instant = T0 + timedelta(days=800)
        _prune(ledger)
    assert _names(ledger_file) == []


def test_a_batch_is_small_and_returns_how_much_it_removed(ledger_file: Path) -> None:
    """No write waits long for housekeeping: one call removes at most a batch of each kind."""
    with ClaimLedger(ledger_file) as ledger:
        ledger.commit([], [Event(EventKind.REFUSED, T0)] * 1200)
        removed = [
            ledger.prune(tombstone_days=1, tombstones_max=1, events_max=100) for _ in range(4)
        ]
    assert removed == [500, 500, 101, 0]


def test_a_long_history_does_not_make_opening_slow(ledger_file: Path) -> None:
    """Opening reads what is held and owed, not what was: 100,000 events cost nothing (C100)."""
    with ClaimLedger(ledger_file) as ledger:
        ledger.commit([], [Event(EventKind.REFUSED, T0, detail="x" * 50)] * 100_000)
    started = time.monotonic()
    with ClaimLedger(ledger_file) as ledger:
        opened = time.monotonic() - started
        started = time.monotonic()
        ledger.prune(tombstone_days=14, tombstones_max=100, events_max=1000)
        pruned = time.monotonic() - started
    assert opened < 2
    assert pruned < 2


def test_removed_room_is_used_again(ledger_file: Path) -> None:
    """A ledger that is pruned as it grows stops growing (I8)."""

    def fill_and_prune(ledger: ClaimLedger) -> None:
        ledger.commit([], [Event(EventKind.REFUSED, T0, detail="x" * 200)] * 2000)
        _prune(ledger, events_max=100)

    with ClaimLedger(ledger_file) as ledger:
        fill_and_prune(ledger)
        pages = raw_connection(ledger._commits._connection)
        before = pages.execute("PRAGMA page_count").fetchone()[0]
        for _ in range(5):
            fill_and_prune(ledger)
        assert pages.execute("PRAGMA page_count").fetchone()[0] <= before * 1.2
