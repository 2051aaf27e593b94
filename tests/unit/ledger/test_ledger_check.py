"""The check finds what is wrong and is silent about what is not."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from ledger_samples import (
    C1,
    C2,
    C3,
    GPU,
    NIC,
    P1,
    T0,
    SteeredClock,
    held,
    pod,
    write_sample,
)

from drastate.errors import LedgerCorruptError, LedgerError
from drastate.ledger.check import Finding, Severity, check
from drastate.ledger.claims import ClaimLedger
from drastate.ledger.engine import open_reader
from drastate.ledger.reader import open_ledger
from drastate.model import Event, EventKind


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A good ledger that the test is about to spoil."""
    path = tmp_path / "ledger.db"
    write_sample(path)
    return path


def _findings(path: Path, *statements: str, script: str = "") -> list[Finding]:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA ignore_check_constraints = ON")
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.executescript(script)
    connection.close()
    with open_ledger(path) as reader:
        return check(reader)


def _wrong(findings: list[Finding]) -> list[Finding]:
    return [each for each in findings if each.severity is not Severity.INFO]


def test_a_sound_ledger_has_nothing_wrong(ledger_file: Path) -> None:
    """Claims in every state, and the only finding is the driver that is waited for."""
    write_sample(ledger_file)
    (finding,) = [each for each in _findings(ledger_file) if each.subject != "events"]
    assert finding.severity is Severity.INFO
    assert f"claim default/c2 ({C2}) of driver {NIC}" == finding.subject
    assert "since 2026-03-01T03:17:07Z, 3 attempts" in finding.text
    assert "last error: driver nic.example.com is not registered" in finding.text
    assert "default/p2" in finding.text
    assert NIC in finding.remedy


def test_an_empty_ledger_and_a_live_one_can_be_checked(ledger_file: Path) -> None:
    """Nothing is wrong with a ledger that a manager has just made, while it runs and after."""
    with ClaimLedger(ledger_file):
        assert _findings_of(ledger_file) == []
    assert _findings_of(ledger_file) == []


def _findings_of(path: Path) -> list[Finding]:
    with open_ledger(path) as reader:
        return check(reader)


def test_a_connection_can_be_checked(ledger_file: Path) -> None:
    """Tests that have a connection need no reader."""
    write_sample(ledger_file)
    connection = open_reader(ledger_file)
    try:
        assert _wrong(check(connection)) == []
    finally:
        connection.close()
        connection.engine.dispose()


@pytest.mark.parametrize(
    ("statement", "severity", "subject", "text"),
    [
        (
            f"UPDATE claims SET status = 'PREPARED' WHERE uid = '{C2}'",
            Severity.ERROR,
            f"claim default/c2 ({C2})",
            "says PREPARED, but its drivers and pods make it UNPREPARING",
        ),
        (
            f"UPDATE claims SET status = 'UNPREPARED' WHERE uid = '{C1}'",
            Severity.ERROR,
            f"claim default/c1 ({C1})",
            "is UNPREPARED, but held by default/p1, default/p2",
        ),
        (
            f"DELETE FROM claim_pods WHERE claim_uid = '{C1}'",
            Severity.ERROR,
            f"claim default/c1 ({C1})",
            "says PREPARED, but its drivers and pods make it UNPREPARING",
        ),
        (
            f"UPDATE claim_drivers SET called = 1 WHERE claim_uid = '{C3}'",
            Severity.ERROR,
            f"claim default/c3 ({C3}) of driver {GPU}",
            "an unprepare is still owed",
        ),
        (
            "INSERT INTO pods VALUES ('pod-x', 'default', 'lonely')",
            Severity.WARNING,
            "pod default/lonely (pod-x)",
            "holds no claim",
        ),
        (
            f"UPDATE claims SET status = 'ODD' WHERE uid = '{C1}'",
            Severity.DAMAGE,
            f"claim default/c1 ({C1})",
            "'ODD' is not a valid ClaimState",
        ),
        (
            f"UPDATE claim_drivers SET since = '' WHERE claim_uid = '{C1}' AND driver = '{GPU}'",
            Severity.DAMAGE,
            f"claim {C1}",
            "Invalid isoformat string: ''",
        ),
        (
            f"UPDATE devices SET request_names = 'gpu' WHERE claim_uid = '{C1}'",
            Severity.DAMAGE,
            f"claim {C1}",
            "Expecting value",
        ),
        (
            f"INSERT INTO claim_pods VALUES ('nobody', '{P1}', 0)",
            Severity.DAMAGE,
            "table claim_pods",
            "refers to a row of claims",
        ),
        (
            "UPDATE events SET at = 'x' WHERE id = 2",
            Severity.DAMAGE,
            "event 2",
            "Invalid isoformat",
        ),
        (
            "UPDATE events SET kind = 'sang' WHERE id = 2",
            Severity.WARNING,
            "event 2",
            "does not know: 'sang'",
        ),
        (
            "UPDATE sqlite_sequence SET seq = 2 WHERE name = 'events'",
            Severity.ERROR,
            "events",
            "some will come twice",
        ),
        (
            "UPDATE ledger SET opened_at = 'never'",
            Severity.DAMAGE,
            "ledger",
            "Invalid isoformat",
        ),
        (
            "DROP INDEX claims_by_name",
            Severity.DAMAGE,
            "file",
            "claims_by_name is missing",
        ),
    ],
)
def test_what_is_wrong_is_found(
    damaged: Path, statement: str, severity: Severity, subject: str, text: str
) -> None:
    """Each contradiction and each damage is named by what it is about."""
    wrong = _wrong(_findings(damaged, statement))
    matching = [each for each in wrong if each.subject == subject and text in each.text]
    assert matching, wrong
    assert matching[0].severity is severity


def test_a_clock_that_went_back_is_worth_knowing(ledger_file: Path) -> None:
    """Instants that go back are no damage: ids tell the order (C100)."""
    clock = SteeredClock()
    with ClaimLedger(ledger_file, clock=clock) as ledger:
        clock.pass_by(days=-365)
        ledger.commit([], [Event(EventKind.REFUSED, clock.now())])
    (finding,) = _findings_of(ledger_file)
    assert (finding.severity, finding.subject) == (Severity.INFO, "events")
    assert "went back 1 times" in finding.text


def test_a_prepared_claim_of_an_unknown_boot_is_worth_knowing(ledger_file: Path) -> None:
    """Without a boot id the claim is prepared again, and the check says so (C37)."""
    with ClaimLedger(ledger_file, clock=SteeredClock()) as ledger:
        ledger.commit([held(C1, "c1", pod(P1, "p1"), at=T0)])
    (finding,) = _findings(ledger_file, "UPDATE claim_drivers SET boot_id = NULL")
    assert finding.severity is Severity.INFO
    assert "unknown boot" in finding.text


def test_a_page_of_noise_is_damage_and_the_rest_is_checked(damaged: Path) -> None:
    """A page in the middle overwritten: damage is named, and the check comes to its end (C78)."""
    content = bytearray(damaged.read_bytes())
    for page in range(2, len(content) // 4096):
        spoiled = damaged.with_name(f"page-{page}.db")
        changed = bytearray(content)
        changed[page * 4096 : (page + 1) * 4096] = b"\xa5" * 4096
        spoiled.write_bytes(changed)
        try:
            with open_ledger(spoiled) as reader:
                findings = check(reader)
        except LedgerCorruptError:
            continue
        assert Severity.DAMAGE in {each.severity for each in findings}, page
        assert spoiled.read_bytes() == changed


def test_every_flipped_byte_of_the_header_is_survived(damaged: Path) -> None:
    """Whatever the header says, the answer is findings or an error of ours, never a crash (C78)."""
    content = damaged.read_bytes()
    spoiled = damaged.with_name("spoiled.db")
    for place in range(100):
        spoiled.write_bytes(content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :])
        try:
            with open_ledger(spoiled) as reader:
                check(reader)
                reader.claims()
        except LedgerError:
            pass
