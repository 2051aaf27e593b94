"""What a reader is told: references, filters, and the rows that are left when one is damaged."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from ledger_samples import C1, C2, C3, C4, C5, GPU, NIC, P1, P2, T0, SteeredClock, write_sample

from drastate.errors import LedgerCorruptError, UsageError
from drastate.ledger.claims import ClaimLedger
from drastate.ledger.filters import ClaimFilter, EventFilter
from drastate.ledger.reader import LedgerReader, open_ledger
from drastate.model import EventKind


@pytest.fixture
def reader(ledger_file: Path) -> Iterator[LedgerReader]:
    write_sample(ledger_file)
    with open_ledger(ledger_file) as opened:
        yield opened


def _change(path: Path, *statements: str) -> None:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA ignore_check_constraints = ON")
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()


@pytest.mark.parametrize(
    ("reference", "uid"),
    [
        (C2, C2),
        ("2222", C2),
        ("22222222-2222", C2),
        ("c2", C2),
        ("default/c2", C2),
        ("lab/c4", C4),
        ("c4", C4),
        ("9999", C5),
    ],
)
def test_a_claim_is_found_by_whatever_names_it(
    reader: LedgerReader, reference: str, uid: str
) -> None:
    """UID, the beginning of one, namespace/name and a name that is unique all mean the claim."""
    assert reader.claim(reference).uid == uid


def test_a_name_of_several_claims_lists_their_uids(reader: LedgerReader) -> None:
    """Two UIDs of one name are told apart in the text, the live one first."""
    with pytest.raises(UsageError) as caught:
        reader.claim("default/c1")
    text = str(caught.value)
    assert text.index(C1) < text.index(C5)
    assert "means 2 claims" in text
    assert "UNPREPARED" in text
    with pytest.raises(UsageError, match="means 2 claims"):
        reader.claim("c1")


@pytest.mark.parametrize("reference", ["222", "nothing", "lab/c1", "default/", "/", "%", "c_", ""])
def test_what_names_no_claim_is_said_so(reader: LedgerReader, reference: str) -> None:
    """Short prefixes, unknown names and SQL's wildcards match nothing."""
    with pytest.raises(UsageError, match="no claim"):
        reader.claim(reference)


def test_a_claim_comes_with_all_that_belongs_to_it(reader: LedgerReader) -> None:
    """Drivers, devices and pods hang on the claim, in a fixed order."""
    claim = reader.claim(C1)
    assert [driver.driver for driver in claim.drivers] == [GPU, NIC]
    assert claim.drivers[0].devices[0].cdi_device_ids == ("gpu.example.com/gpu=gpu-0",)
    assert claim.drivers[1].devices[0].share_id == "s1"
    assert [pod.uid for pod in claim.pods] == [P1, P2]
    assert claim.drivers[0].owes_unprepare
    ending = reader.claim(C2)
    assert ending.drivers[0].is_awaited
    assert ending.pods[0].releasing
    assert ending.drivers[0].since == T0 + timedelta(minutes=5)
    assert not reader.claim(C3).drivers[0].owes_unprepare


@pytest.mark.parametrize(
    ("wanted", "uids"),
    [
        (ClaimFilter(), [C5, C1, C2, C3, C4]),
        (ClaimFilter(tombstones=False), [C1, C2, C4]),
        (ClaimFilter(statuses=("UNPREPARED",), tombstones=False), [C5, C3]),
        (ClaimFilter(statuses=("PREPARED", "PREPARING")), [C1, C4]),
        (ClaimFilter(namespace="lab"), [C4]),
        (ClaimFilter(driver=NIC), [C1, C2]),
        (ClaimFilter(pod=P2), [C1, C2]),
        (ClaimFilter(pod="p1"), [C1, C4]),
        (ClaimFilter(pod="default/p1", namespace="default"), [C1]),
        (ClaimFilter(pod="other/p1"), []),
        (ClaimFilter(since=T0), [C5, C1, C2, C3, C4]),
        (ClaimFilter(since=T0 + timedelta(seconds=1)), []),
        (ClaimFilter(uid=C2, driver=GPU), []),
    ],
)
def test_filters_narrow_the_claims(
    reader: LedgerReader, wanted: ClaimFilter, uids: list[str]
) -> None:
    """Each filter narrows, together they narrow more, and the summaries agree with the rows."""
    found = reader.claims(wanted)
    assert sorted(claim.uid for claim in found) == sorted(uids)
    summaries = reader.claim_summaries(wanted)
    assert [each.uid for each in summaries] == [claim.uid for claim in found]
    for claim, summary in zip(found, summaries, strict=True):
        assert summary.drivers == tuple(driver.driver for driver in claim.drivers)
        assert summary.pods == tuple(pod.name for pod in claim.pods)
        assert summary.status == claim.status


def test_pods_say_what_they_wait_for(reader: LedgerReader) -> None:
    """A pod that asked to let go names the driver that has not confirmed; others name none."""
    first, second = reader.pods()
    assert (first.uid, second.uid) == (P1, P2)
    assert [claim.waiting_for for claim in first.claims] == [(), ()]
    assert {claim.uid: claim.waiting_for for claim in second.claims} == {C1: (), C2: (NIC,)}
    assert reader.pods(namespace="lab") == ()


@pytest.mark.parametrize(
    ("wanted", "kinds"),
    [
        (EventFilter(claim=C3), ["prepared", "unprepared"]),
        (EventFilter(claim="default/c3"), ["prepared", "unprepared"]),
        (EventFilter(claim="c3", kind="unprepared"), ["unprepared"]),
        (EventFilter(claim="3333"), ["prepared", "unprepared"]),
        (EventFilter(claim="33"), []),
        (EventFilter(driver=NIC), ["unprepare_failed"]),
        (EventFilter(pod=P2), ["unprepare_failed"]),
        (EventFilter(pod="p2"), ["unprepare_failed"]),
        (EventFilter(pod="default/p2"), ["unprepare_failed"]),
        (EventFilter(since=T0 + timedelta(minutes=1)), ["unprepare_failed"]),
        (EventFilter(kind="opened"), ["opened"]),
        (EventFilter(limit=2), ["unprepare_failed", "closed"]),
        (EventFilter(limit=0), []),
    ],
)
def test_filters_narrow_the_events(
    reader: LedgerReader, wanted: EventFilter, kinds: list[str]
) -> None:
    """The newest come last, and a limit keeps the newest."""
    assert [event.kind for event in reader.events(wanted)] == kinds


def test_an_event_names_its_pod_while_it_is_there(reader: LedgerReader) -> None:
    """The pod of an event is named as long as it holds a claim."""
    (event,) = reader.events(EventFilter(driver=NIC))
    assert (event.pod_uid, event.pod) == (P2, "default/p2")
    assert event.kind == EventKind.UNPREPARE_FAILED


def test_info_counts_what_is_there(reader: LedgerReader, ledger_file: Path) -> None:
    """Identity, sizes and counts of a closed ledger."""
    info = reader.info()
    assert info.claims == {"PREPARED": 1, "PREPARING": 1, "UNPREPARED": 2, "UNPREPARING": 1}
    assert (info.pods, info.events, info.node_name) == (2, 6, "node-a")
    assert info.size_bytes == ledger_file.stat().st_size
    assert (info.in_use, info.pid, info.wal_size_bytes) == (False, None, None)
    assert (info.first_event_at, info.last_event_at) == (T0, T0 + timedelta(minutes=5))


def test_a_live_ledger_is_read_in_place(ledger_file: Path) -> None:
    """A reader sees each commit of a running manager, by its state folder too."""
    import os

    from ledger_samples import held, pod

    with ClaimLedger(ledger_file) as ledger, open_ledger(ledger_file.parent) as reader:
        assert reader.live
        assert reader.warnings == ()
        assert reader.info().pid == os.getpid()
        assert reader.info().wal_size_bytes
        for number in range(3):
            ledger.commit([held(f"uid-{number}", f"c{number}", pod(P1, "p1"))])
            assert len(reader.claims()) == number + 1


_DAMAGE = {
    "a list that is no JSON": (
        f"UPDATE devices SET cdi_device_ids = '[\"x' WHERE claim_uid = '{C1}' AND driver = '{GPU}'",
        "Unterminated string",
    ),
    "a list with something after it": (
        f"UPDATE devices SET cdi_device_ids = '[\"x\"] y' WHERE claim_uid = '{C1}'",
        "is not a list of strings",
    ),
    "a list of numbers": (
        f"UPDATE devices SET request_names = '[1]' WHERE claim_uid = '{C1}' AND driver = '{GPU}'",
        "is not a list of strings",
    ),
    "an instant that is none": (
        f"UPDATE claim_drivers SET since = 'soon' WHERE claim_uid = '{C1}' AND driver = '{GPU}'",
        "Invalid isoformat",
    ),
    "an instant without zone": (
        f"UPDATE claims SET created_at = '2026-01-01T00:00:00' WHERE uid = '{C1}'",
        "has no time zone",
    ),
    "an instant that is a number": (
        f"UPDATE claims SET changed_at = x'00ff' WHERE uid = '{C1}'",
        "must be str",
    ),
}


@pytest.mark.parametrize("damage", _DAMAGE)
def test_one_damaged_row_never_hides_the_others(tmp_path: Path, damage: str) -> None:
    """What cannot be read is named by its claim; every other claim is given (C78)."""
    statement, text = _DAMAGE[damage]
    path = tmp_path / "ledger.db"
    write_sample(path)
    _change(path, statement)
    with open_ledger(path) as reader:
        uids = {claim.uid for claim in reader.claims()}
        assert uids >= {C2, C3, C4, C5}
        assert {problem.subject for problem in reader.problems} == {f"claim {C1}"}
        assert text in reader.problems[0].text


def test_text_that_is_not_utf8_hides_nothing(tmp_path: Path) -> None:
    """A name with broken bytes is shown with a mark, and the damage is reported once (C78)."""
    path = tmp_path / "ledger.db"
    write_sample(path)
    _change(path, f"UPDATE claims SET name = CAST(x'63ff33' AS TEXT) WHERE uid = '{C3}'")
    with open_ledger(path) as reader:
        names = [claim.name for claim in reader.claims()]
        assert "c\N{REPLACEMENT CHARACTER}3" in names
        assert len(names) == 5
        assert [problem.subject for problem in reader.problems] == ["ledger"]


def test_a_bad_event_hides_no_other(tmp_path: Path) -> None:
    """The history is given without the entry that cannot be read."""
    path = tmp_path / "ledger.db"
    write_sample(path)
    _change(path, "UPDATE events SET at = 'yesterday' WHERE id = 3")
    with open_ledger(path) as reader:
        assert [event.id for event in reader.events()] == [1, 2, 4, 5, 6]
        assert [problem.subject for problem in reader.problems] == ["event 3"]


def test_a_table_that_is_missing_is_damage(tmp_path: Path) -> None:
    """A ledger whose revision promises more than is there is called damaged, in words."""
    path = tmp_path / "ledger.db"
    write_sample(path)
    _change(path, "DROP TABLE devices")
    with (
        open_ledger(path) as reader,
        pytest.raises(LedgerCorruptError, match="no such table: devices"),
    ):
        reader.claims()


def test_a_claim_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    """Asking for the damaged claim itself gives the reason and not "no such claim"."""
    path = tmp_path / "ledger.db"
    write_sample(path)
    _change(path, f"UPDATE claims SET created_at = 'soon' WHERE uid = '{C1}'")
    with open_ledger(path) as reader, pytest.raises(UsageError, match=r"cannot be read.*soon"):
        reader.claim(C1)


def test_a_reader_holds_no_transaction_between_answers(ledger_file: Path) -> None:
    """After an answer the log can be moved into the database: nobody is in its way (C99)."""
    from ledger_samples import held, pod

    from drastate.ledger.engine import raw_connection

    with ClaimLedger(ledger_file, clock=SteeredClock()) as ledger:
        ledger.commit([held(C1, "c1", pod(P1, "p1"))])
        with open_ledger(ledger_file) as reader:
            reader.claims()
            reader.events()
            reader.pods()
            reader.info()
            raw = raw_connection(ledger._commits._connection)
            busy, _, _ = raw.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            assert busy == 0
