"""The power fails at any system call: what was not synced is lost, torn or reordered.

Not the process alone: `test_kill.py` has that. Here the disk of every instant of a pod's life is made
from a system-call trace and opened.
"""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from disk_trace import STRACE, File, replay
from scenario import CLAIMS, DRIVERS, POD

from drastate.errors import LedgerCorruptError
from drastate.ledger.claims import ClaimLedger
from drastate.model import ClaimState
from drastate.testing.driver import FakeDriver, node_root

SEEDS = 3
EXPECTED = {(uid, driver) for uid, drivers in CLAIMS.values() for driver in drivers}


@pytest.fixture(scope="module")
def trace() -> str:
    if shutil.which("strace") is None and "CI" not in os.environ:
        pytest.skip("needs strace")
    with ExitStack() as stack:
        root = stack.enter_context(node_root())
        for name in DRIVERS:
            stack.enter_context(FakeDriver(root / "plugins_registry", name))
        script = Path(__file__).with_name("power_child.py")
        subprocess.run(
            [*STRACE, "-o", root / "trace", sys.executable, script, root], check=True, timeout=100
        )
        return (root / "trace").read_text()


def rebuild(folder: Path, files: dict[str, File], keep: random.Random | None) -> Path:
    """The state folder as the disk has it; the shared memory file is never on it."""
    folder.mkdir()
    for path, file in files.items():
        name = Path(path).name
        if name in ("ledger.db", "ledger.db-wal"):
            (folder / name).write_bytes(file.after_loss(keep))
    return folder / "ledger.db"


def promised(marks: list[str]) -> set[str]:
    """What the run had been promised, or had done, by then: the last mark of each kind."""
    since_intent = (
        marks[len(marks) - marks[::-1].index("prepare.before_intent") :]
        if ("prepare.before_intent" in marks)
        else []
    )
    return set(since_intent)


@pytest.mark.parametrize("seed", [None, *range(SEEDS)])
def test_c34_after_a_power_loss(trace: str, tmp_path: Path, seed: int | None) -> None:
    """C34, I1, I6: at every instant the disk opens, knows each call that had left, and keeps each
    result that had been told.
    """
    keep = None if seed is None else random.Random(seed)
    states = 0
    for number, (marks, files) in enumerate(replay(trace, "marks")):
        if not any(path.endswith("ledger.db") for path in files):
            continue
        path = rebuild(tmp_path / str(number), files, keep)
        now = promised(marks)
        with ClaimLedger(path) as ledger:
            known = {
                (record.ref.uid, driver): state.state
                for record in ledger.all()
                for driver, state in record.drivers.items()
            }
            pods = set(ledger.pods())
        check = sqlite3.connect(path)
        assert check.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        check.close()
        if "prepare.before_call" in now and "unprepare.after_call" not in now:
            assert known.keys() == EXPECTED
            assert pods == {POD}
        if "unprepare.before_intent" in now and "unprepare.before_call" not in now:
            assert set(known.values()) <= {ClaimState.PREPARED, ClaimState.UNPREPARING}
        if "closed" in now:
            assert known == {}
        states += 1
        shutil.rmtree(tmp_path / str(number))
    assert states > 40


def test_the_simulation_can_fail(trace: str, tmp_path: Path) -> None:
    """A disk that forgets its last sync before a call is found out: the check above has teeth."""
    lost = "\n".join(line for line in trace.splitlines() if "sync(" not in line)
    found = 0
    for marks, files in replay(lost, "marks"):
        if "prepare.before_call" not in promised(marks):
            continue
        path = rebuild(tmp_path / "state", files, None)
        try:
            with ClaimLedger(path) as ledger:
                found += ledger.all() == ()
        except LedgerCorruptError:
            found += 1
        break
    assert found == 1
