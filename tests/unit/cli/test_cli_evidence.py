"""Every inspecting command leaves the files it reads byte for byte as they were (C96)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from ledger_samples import C1, fill, fingerprint

from drastate.cli.main import main
from drastate.ledger.claims import ClaimLedger
from drastate.ledger.engine import raw_connection

COMMANDS = (["claims"], ["claim", C1], ["pods"], ["events"], ["check"], ["info"])
KEPT = {
    "all three files": ("", "-wal", "-shm"),
    "the main file alone": ("",),
    "main file and log": ("", "-wal"),
}


@pytest.mark.parametrize("kept", KEPT)
def test_evidence_stays_byte_identical(
    kept: str,
    ledger_file: Path,
    crashed: Callable[[ClaimLedger], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Content, modes and times are as before, and no file has come or gone."""
    has_log = "-wal" in KEPT[kept]
    with ClaimLedger(ledger_file) as ledger:
        fill(ledger)
        if not has_log:
            raw_connection(ledger._commits._connection).execute("PRAGMA wal_checkpoint(TRUNCATE)")
        path = crashed(ledger)
    for suffix in ("", "-wal", "-shm"):
        if suffix not in KEPT[kept]:
            path.with_name(path.name + suffix).unlink()
    before = fingerprint(path.parent)
    for arguments in COMMANDS:
        for form in ("table", "json", "yaml"):
            assert main([*arguments, "--ledger", str(path), "-o", form]) == 0
            said = capsys.readouterr()
            assert said.out
            assert ("the -wal file is missing" in said.err) is not has_log
            assert fingerprint(path.parent) == before, (arguments, form)


def test_a_whole_process_leaves_nothing_beside_the_evidence(
    ledger_file: Path, crashed: Callable[[ClaimLedger], Path]
) -> None:
    """Nor does the end of the process, where connections that were forgotten would be closed."""
    with ClaimLedger(ledger_file) as ledger:
        fill(ledger)
        path = crashed(ledger)
    before = fingerprint(path.parent)
    for arguments in (["claims"], ["check"]):
        assert _run(arguments, path).returncode == 0
        assert fingerprint(path.parent) == before


def _run(arguments: list[str], path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "drastate.cli.main", *arguments, "--ledger", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_live_ledger_is_not_written_to(ledger_file: Path) -> None:
    """Beside a running manager only the index -shm may change, in which readers sign in."""
    with ClaimLedger(ledger_file) as ledger:
        fill(ledger)
        before = fingerprint(ledger_file.parent)
        for arguments in COMMANDS:
            done = _run(arguments, ledger_file)
            assert (done.returncode, done.stderr) == (0, "")
            after = fingerprint(ledger_file.parent)
            assert after.keys() == before.keys()
            changed = {name for name in before if after[name] != before[name]}
            assert changed <= {"ledger.db-shm"}, arguments
