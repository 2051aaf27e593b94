"""Fixtures for every room: a place for a ledger that is checked when the test is over."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # rooms that know no ledger are tested without loading one
    from drastate.ledger.claims import ClaimLedger


@pytest.fixture
def ledger_file(tmp_path: Path) -> Iterator[Path]:
    """Where a test puts its ledger; what it leaves there must be sound."""
    path = tmp_path / "state" / "ledger.db"
    path.parent.mkdir()
    yield path
    if path.exists():
        from drastate.ledger.check import Severity, check
        from drastate.ledger.reader import open_ledger

        with open_ledger(path) as reader:
            assert [each for each in check(reader) if each.severity != Severity.INFO] == []


@pytest.fixture
def crashed(tmp_path: Path) -> Callable[[ClaimLedger], Path]:
    """Makes a folder as the death of a ledger's process leaves it: main file and -wal, no lock."""

    def copy(ledger: ClaimLedger) -> Path:
        folder = tmp_path / "evidence"
        folder.mkdir()
        for suffix in ("", "-wal", "-shm"):
            source = ledger.path.with_name(ledger.path.name + suffix)
            shutil.copyfile(source, folder / f"ledger.db{suffix}")
        return folder / "ledger.db"

    return copy
