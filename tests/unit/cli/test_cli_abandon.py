"""``drastate abandon``: C26 from the command line."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from ledger_samples import C1, P1, held, pod

from drastate.cli.main import main
from drastate.ledger.claims import ClaimLedger
from drastate.model import ClaimState

Capture = pytest.CaptureFixture[str]
G = "gpu.example.com"


@pytest.fixture
def waiting(ledger_file: Path) -> Path:
    """A state folder whose claim c1 waits for its driver, and pod p1 with it."""
    record = held(C1, "c1", pod(P1, "p1"))
    driver = replace(record.drivers[G], state=ClaimState.UNPREPARING, last_error="away")
    with ClaimLedger(ledger_file) as ledger:
        ledger.commit([record])
        ledger.commit(
            [replace(record, drivers={G: driver}, pods={P1: pod(P1, "p1", releasing=True)})]
        )
    return ledger_file.parent


def _abandon(folder: Path, claim: str = "default/c1", driver: str = G, reason: str = "gone") -> int:
    return main(
        [*("abandon", claim, "--driver", driver), "--reason", reason, "--state-dir", str(folder)]
    )


def _rows(folder: Path, sql: str) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(folder / "ledger.db")
    try:
        return connection.execute(sql).fetchall()
    finally:
        connection.close()


@pytest.mark.parametrize("claim", ["default/c1", C1])
def test_c26_it_says_what_it_did(waiting: Path, capsys: Capture, claim: str) -> None:
    """C26: claim and driver are named, and the pod that waits no more; the history has it."""
    assert _abandon(waiting, claim) == 0
    said = capsys.readouterr().out
    assert f"default/c1 ({C1}): driver {G} is given up" in said
    assert f"pod default/p1 ({P1}) waits for it no more" in said
    assert _rows(waiting, "SELECT state FROM claim_drivers") == [("UNPREPARED",)]
    assert _rows(waiting, "SELECT count(*) FROM claim_pods") == [(0,)]
    [(detail,)] = _rows(waiting, "SELECT detail FROM events WHERE kind = 'abandoned'")
    assert str(detail).startswith("gone (by ")
    assert "last error: away" in str(detail)
    assert main(["events", "--ledger", str(waiting)]) == 0
    assert "abandoned" in capsys.readouterr().out


def test_c26_refusals(waiting: Path, ledger_file: Path, capsys: Capture) -> None:
    """Wrong names, no reason and a second time: one line, a status, and nothing is changed."""
    for arguments, status, words in [
        ({"claim": "default/nope"}, 1, "drastate claims"),
        ({"driver": "x.example.com"}, 2, f"it has: {G}"),
        ({"reason": " "}, 2, "needs a reason"),
    ]:
        assert _abandon(waiting, **arguments) == status
        said = capsys.readouterr().err
        assert words in said
        assert said.count("\n") == 1
    assert _rows(waiting, "SELECT state FROM claim_drivers") == [("UNPREPARING",)]
    assert _abandon(waiting) == 0
    assert _abandon(waiting) == 1
    assert len(_rows(waiting, "SELECT 1 FROM events WHERE kind = 'abandoned'")) == 1


def test_c26_a_live_pod_is_named(ledger_file: Path, capsys: Capture) -> None:
    """C26, I3: refused while a pod holds the claim."""
    with ClaimLedger(ledger_file) as ledger:
        ledger.commit([held(C1, "c1", pod(P1, "p1"))])
    assert _abandon(ledger_file.parent) == 1
    assert f"is held by default/p1 ({P1})" in capsys.readouterr().err
    assert _rows(ledger_file.parent, "SELECT state FROM claim_drivers") == [("PREPARED",)]


def test_a_running_agent_has_the_ledger(waiting: Path, ledger_file: Path, capsys: Capture) -> None:
    """I7: refused with the pid of the process that writes the ledger."""
    import os

    with ClaimLedger(ledger_file):
        assert _abandon(waiting) == 1
    assert f"pid {os.getpid()}" in capsys.readouterr().err


def test_no_ledger_is_made(tmp_path: Path, capsys: Capture) -> None:
    """A mistyped folder gets no ledger of its own."""
    assert _abandon(tmp_path) == 1
    assert "no claim ledger" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
