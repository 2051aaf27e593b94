"""Copies of a ledger are read whole or with a warning, and never touched (C96)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from ledger_samples import P1, SteeredClock, fingerprint, held, pod, write_sample

from drastate.errors import LedgerBusyError, LedgerCorruptError, LedgerError, UsageError
from drastate.ledger import evidence
from drastate.ledger.claims import ClaimLedger
from drastate.ledger.engine import open_writer, raw_connection
from drastate.ledger.reader import open_ledger
from drastate.ledger.schema import bring_up_to_date

Crashed = Callable[[ClaimLedger], Path]


def _fill(ledger: ClaimLedger) -> None:
    for number in range(50):
        ledger.commit([held(f"uid-{number}", f"c{number}", pod(P1, "p1"))])


@pytest.fixture
def copied(ledger_file: Path, crashed: Crashed) -> Path:
    """Main file, -wal and -shm of a manager that ran: 50 claims, all of them in the log."""
    with ClaimLedger(ledger_file) as ledger:
        raw_connection(ledger._commits._connection).execute("PRAGMA wal_checkpoint(TRUNCATE)")
        _fill(ledger)
        return crashed(ledger)


def _read(path: Path) -> tuple[int, tuple[str, ...]]:
    """How many claims there are and the warnings; the folder must be as it was."""
    before = fingerprint(path.parent)
    with open_ledger(path) as reader:
        found = len(reader.claims()), reader.warnings
        reader.events()
        reader.info()
    assert fingerprint(path.parent) == before
    return found


def test_all_three_files_give_everything(copied: Path) -> None:
    """(a) Main file, -wal and -shm: 50 claims, no warning, nothing touched."""
    assert _read(copied) == (50, ())


def test_main_and_log_give_everything(copied: Path) -> None:
    """(c) Without -shm, which SQLite would make again beside the evidence."""
    copied.with_name("ledger.db-shm").unlink()
    assert _read(copied) == (50, ())


def test_the_main_file_alone_gives_a_warning(copied: Path) -> None:
    """(b) Without -wal what is there is old, and the reader says so."""
    copied.with_name("ledger.db-shm").unlink()
    copied.with_name("ledger.db-wal").rename(copied.parent.parent / "elsewhere")
    count, warnings = _read(copied)
    assert count == 0
    assert len(warnings) == 1
    assert "the -wal file is missing; this may be older than the live ledger" in warnings[0]


def test_the_main_file_of_a_closed_ledger_is_enough(ledger_file: Path, tmp_path: Path) -> None:
    """(e) After a clean stop the main file is everything, and there is nothing to warn of."""
    write_sample(ledger_file)
    copy = tmp_path / "laptop" / "node-7.db"
    copy.parent.mkdir()
    shutil.copyfile(ledger_file, copy)
    assert _read(copy) == (5, ())


def test_a_second_session_copied_without_its_log_gives_a_warning(
    ledger_file: Path, tmp_path: Path
) -> None:
    """A ledger that was closed once and is open again: its main file alone must not look sound."""
    write_sample(ledger_file)
    copy = tmp_path / "copy.db"
    clock = SteeredClock()
    clock.pass_by(hours=1)
    with ClaimLedger(ledger_file, clock=clock) as ledger:
        _fill(ledger)
        shutil.copyfile(ledger_file, copy)
    with open_ledger(copy) as reader:
        assert reader.warnings


def test_a_young_ledger_without_its_log_is_explained(ledger_file: Path, tmp_path: Path) -> None:
    """Before the first checkpoint everything lies in -wal: the text says what to copy."""
    copy = tmp_path / "copy.db"
    engine, connection = open_writer(ledger_file, busy_timeout_ms=1_000)
    bring_up_to_date(connection, ledger_file)
    shutil.copyfile(ledger_file, copy)
    connection.close()
    engine.dispose()
    with pytest.raises(LedgerCorruptError, match=r"copy copy\.db-wal along with it"):
        open_ledger(copy)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_folder_that_cannot_be_written_is_read(copied: Path) -> None:
    """(d) Evidence on a read-only place, read by somebody who owns none of it."""
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))  # pytest's own folders are closed to others
    try:
        for source in copied.parent.iterdir():
            target = folder / source.name
            shutil.copyfile(source, target)
            target.chmod(0o444)
        folder.chmod(0o555)
        before = fingerprint(folder)
        code = """
            import drastate.ledger.reader, drastate.ledger.rows, sqlalchemy.dialects.sqlite.pysqlite
            import encodings.idna, os, pathlib, sys
            os.setgroups([])
            os.setuid(65534)
            with drastate.ledger.reader.open_ledger(pathlib.Path(sys.argv[1])) as reader:
                print(len(reader.claims()), reader.warnings)
        """
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), str(folder)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.stdout, done.stderr) == ("50 ()\n", "")
        assert fingerprint(folder) == before
    finally:
        shutil.rmtree(folder)


def test_a_folder_of_evidence_is_read_like_a_state_folder(copied: Path) -> None:
    """The folder can be named instead of the file."""
    with open_ledger(copied.parent) as reader:
        assert len(reader.claims()) == 50


def test_a_symbolic_link_leads_to_the_log_beside_the_file(copied: Path, tmp_path: Path) -> None:
    """A link to the database is read with the -wal of the database, not of the link."""
    link = tmp_path / "link.db"
    link.symlink_to(copied)
    with open_ledger(link) as reader:
        assert len(reader.claims()) == 50


def test_the_private_copy_is_private_and_goes(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is copied is closed to others and gone after the close, after a failed open too."""
    room = tmp_path / "tmp"
    room.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(room))
    with open_ledger(copied) as reader:
        (folder,) = room.iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
        reader.claims()
    assert list(room.iterdir()) == []
    text = tmp_path / "text.db"
    text.write_bytes(b"SQLite format 3\0 but not really" * 100)
    with pytest.raises(LedgerCorruptError):
        open_ledger(text)
    assert list(room.iterdir()) == []


def test_a_live_ledger_is_not_copied(
    ledger_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A running manager's ledger is read where it is, however large."""
    room = tmp_path / "tmp"
    room.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(room))
    with ClaimLedger(ledger_file), open_ledger(ledger_file):
        assert list(room.iterdir()) == []


def test_no_room_for_the_copy_is_said_so(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full temporary folder is one clear error that names it."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(LedgerError, match=r"No space left.*TMPDIR"):
        open_ledger(copied)


def test_evidence_that_changes_while_it_is_copied_is_not_believed(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of a file that somebody writes to at the same time would be torn."""
    real = shutil.copyfile

    def copy(source: Path, target: Path) -> None:
        real(source, target)
        with source.open("ab") as file:
            file.write(b"\0" * 4096)

    monkeypatch.setattr(shutil, "copyfile", copy)
    with pytest.raises(LedgerBusyError, match="changes while it is being copied"):
        open_ledger(copied)


def test_what_is_no_plain_file_is_refused(tmp_path: Path) -> None:
    """A pipe would block and a device never end."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        with pytest.raises(LedgerCorruptError, match="is not a file"):
            open_ledger(path)


def test_missing_evidence_is_said_so(tmp_path: Path) -> None:
    """A missing file and a folder without a ledger are told apart."""
    with pytest.raises(UsageError, match="no claim ledger at"):
        open_ledger(tmp_path / "x.db")
    with pytest.raises(UsageError, match=r"no claim ledger \(ledger.db\) in folder"):
        open_ledger(tmp_path)


@pytest.mark.parametrize("size", [0, 1, 15, 16, 100, 4096, 8192])
def test_a_truncated_file_is_damage(ledger_file: Path, tmp_path: Path, size: int) -> None:
    """Cut anywhere, a ledger is called damaged or empty in words, and kept (C78)."""
    write_sample(ledger_file)
    cut = tmp_path / "cut.db"
    cut.write_bytes(ledger_file.read_bytes()[:size])
    with pytest.raises(LedgerCorruptError), open_ledger(cut) as reader:
        reader.claims()
    assert cut.stat().st_size == size


def test_a_manager_that_is_just_starting_is_waited_for(
    ledger_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock without a schema is a ledger in the making, not a damaged one (C89)."""
    from drastate.ledger.engine import WriterLock

    lock = WriterLock(ledger_file)
    ledger_file.touch()
    sleeps: list[float] = []

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        if len(sleeps) == 3:
            lock.release()
            ClaimLedger(ledger_file).close()

    monkeypatch.setattr(evidence.time, "sleep", sleep)
    with open_ledger(ledger_file) as reader:
        assert reader.claims() == ()
    assert len(sleeps) == 3
