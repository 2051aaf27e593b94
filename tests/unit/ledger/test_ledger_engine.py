"""How the file is opened: settings, locks, modes, and what the world can do to it."""

from __future__ import annotations

import fcntl
import os
import re
import sqlite3
import stat
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from ledger_samples import C1, C2, P1, T0, held, pod, write_sample

import drastate.ledger
from drastate.errors import (
    LedgerBusyError,
    LedgerCorruptError,
    LedgerError,
    LedgerUnwritableError,
    UsageError,
)
from drastate.ledger.claims import ClaimLedger
from drastate.ledger.engine import (
    is_in_use,
    ledger_path,
    lock_path,
    open_reader,
    open_writer,
    raw_connection,
)
from drastate.ledger.reader import open_ledger
from drastate.model import Event, EventKind


def _python(code: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_the_writer_has_its_settings_right_after_opening(ledger_file: Path) -> None:
    """Foreign keys on, full sync and WAL, read back from the open connection (C103)."""
    engine, connection = open_writer(ledger_file, busy_timeout_ms=5_000)
    try:
        raw = raw_connection(connection)
        assert raw.execute("PRAGMA foreign_keys").fetchone() == (1,)
        assert raw.execute("PRAGMA synchronous").fetchone() == (2,)
        assert raw.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert raw.execute("PRAGMA busy_timeout").fetchone() == (5_000,)
        assert raw.isolation_level is None
    finally:
        connection.close()
        engine.dispose()
    ledger_file.unlink()


def test_the_settings_survive_the_migrations(ledger_file: Path) -> None:
    """Foreign keys hold in a ledger that was just made: a device needs its driver (C103)."""
    with ClaimLedger(ledger_file) as ledger:
        raw = raw_connection(ledger._commits._connection)
        assert raw.execute("PRAGMA foreign_keys").fetchone() == (1,)
        assert raw.execute("PRAGMA synchronous").fetchone() == (2,)
        with pytest.raises(sqlite3.IntegrityError, match="FOREIGN KEY"):
            raw.execute(
                "INSERT INTO devices VALUES ('nobody', 'd', 0, 'pool', 'device', NULL, '[]', '[]')"
            )


def test_files_are_private(ledger_file: Path) -> None:
    """Database, log, index and lock are readable by their owner alone, whatever the umask."""
    before = os.umask(0)
    try:
        with ClaimLedger(ledger_file) as ledger:
            ledger.commit([held(C1, "c1", pod(P1, "p1"))])
            modes = {
                path.name: stat.S_IMODE(path.stat().st_mode)
                for path in ledger_file.parent.iterdir()
            }
    finally:
        os.umask(before)
    assert set(modes) == {"ledger.db", "ledger.db-wal", "ledger.db-shm", "ledger.db.lock"}
    assert set(modes.values()) == {0o600}


def test_a_second_manager_is_refused_with_the_pid_of_the_first(ledger_file: Path) -> None:
    """One ledger, one writer, in one process too; a close lets the next one in (I7)."""
    with ClaimLedger(ledger_file):
        with pytest.raises(LedgerBusyError, match=f"in use by pid {os.getpid()}") as caught:
            ClaimLedger(ledger_file)
        assert caught.value.pid == os.getpid()
        assert is_in_use(ledger_file)
    assert not is_in_use(ledger_file)
    ClaimLedger(ledger_file).close()


def test_a_manager_in_another_process_is_named(ledger_file: Path) -> None:
    """The refusal names the other process, and its death frees the ledger at once (I7)."""
    child = _python(
        """
        import sys, pathlib
        from drastate.ledger.claims import ClaimLedger
        ledger = ClaimLedger(pathlib.Path(sys.argv[1]))
        print("open", flush=True)
        sys.stdin.read()
        """,
        ledger_file,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "open\n"
    with pytest.raises(LedgerBusyError) as caught:
        ClaimLedger(ledger_file)
    assert caught.value.pid == child.pid
    child.kill()
    child.communicate()
    ClaimLedger(ledger_file).close()


def test_a_reader_that_looks_does_not_keep_a_manager_out(ledger_file: Path) -> None:
    """A `drastate claims` that looks whether a manager runs must not make its start fail (C99)."""
    ClaimLedger(ledger_file).close()
    looking = os.open(lock_path(ledger_file), os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH | fcntl.LOCK_NB)  # what is_in_use holds for a moment
    moment = threading.Timer(0.05, os.close, [looking])
    moment.start()
    try:
        ClaimLedger(ledger_file).close()
    finally:
        moment.join()


def test_twenty_processes_open_a_fresh_ledger_at_once(ledger_file: Path) -> None:
    """Of five that want to write one does; fifteen readers read; nobody is told "locked" (C89)."""
    writer = """
        import sys, pathlib
        from drastate.errors import LedgerBusyError
        from drastate.ledger.claims import ClaimLedger
        sys.stdin.readline()
        try:
            ledger = ClaimLedger(pathlib.Path(sys.argv[1]))
        except LedgerBusyError as error:
            print("refused" if "already in use by pid" in str(error) else error, flush=True)
        else:
            print("wrote", flush=True)
            sys.stdin.read()
            ledger.close()
    """
    reader = """
        import sys, pathlib, time
        from drastate.errors import UsageError
        from drastate.ledger.reader import open_ledger
        sys.stdin.readline()
        for _ in range(2000):
            try:
                with open_ledger(pathlib.Path(sys.argv[1])) as ledger:
                    ledger.claims()
                    ledger.events()
            except UsageError:
                time.sleep(0.01)  # not there yet
            else:
                print("read", flush=True)
                break
    """
    children = [_python(writer, ledger_file) for _ in range(5)]
    children += [_python(reader, ledger_file) for _ in range(15)]
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    said = [child.stdout.readline().strip() for child in children if child.stdout]
    for child in children:
        child.communicate()
    assert sorted(said[:5]) == ["refused"] * 4 + ["wrote"]
    assert said[5:] == ["read"] * 15
    assert [child.returncode for child in children] == [0] * 20


def test_every_write_takes_the_lock_when_it_begins(ledger_file: Path) -> None:
    """No transaction of the writer starts deferred: reading first cannot lose it the lock (C90)."""
    with ClaimLedger(ledger_file) as ledger:
        statements: list[str] = []
        raw_connection(ledger._commits._connection).set_trace_callback(statements.append)
        ledger.commit([held(C1, "c1", pod(P1, "p1"))])
        ledger.prune(tombstone_days=1, tombstones_max=1, events_max=1)
        begins = [each for each in statements if each.startswith("BEGIN")]
    assert begins == ["BEGIN IMMEDIATE"] * 2


def test_no_source_begins_another_kind_of_transaction_or_unlinks_a_log() -> None:
    """BEGIN stands in the engine alone, and nothing removes -wal or -shm (C90, C94)."""
    room = Path(drastate.ledger.__file__).parent
    for path in room.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if path.name != "engine.py":
            assert not re.search(r"\"BEGIN|sqlite3\.connect\((?!partial)", text), path
        assert "immutable" not in text, path
        for line in text.splitlines():
            if "unlink" in line or "os.remove" in line:
                assert "partial" in line or "would" in line or "ever" in line, (path, line)


def test_a_reader_cannot_write(ledger_file: Path) -> None:
    """The connection of a reader refuses every write, to a live ledger and to a copy (C91)."""
    write_sample(ledger_file)
    connection = open_reader(ledger_file)
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        raw_connection(connection).execute("DELETE FROM claims")
    connection.close()
    connection.engine.dispose()
    with open_ledger(ledger_file) as reader:
        raw = raw_connection(reader.query.connection)
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            raw.execute("DELETE FROM claims")


def test_a_reader_in_the_middle_of_reading_does_not_stop_the_writer(ledger_file: Path) -> None:
    """Readers keep their view, the writer goes on, and neither waits (I7, C90)."""
    with ClaimLedger(ledger_file) as ledger:
        ledger.commit([held(C1, "c1", pod(P1, "p1"))])
        with open_ledger(ledger_file) as reader:
            count = "SELECT count(*) FROM claims"
            with reader.query.transaction():
                assert reader.query.rows(count)[0][0] == 1
                ledger.commit([held(C2, "c2", pod(P1, "p1"))])
                assert reader.query.rows(count)[0][0] == 1
            with reader.query.transaction():
                assert reader.query.rows(count)[0][0] == 2


def test_a_foreign_lock_is_waited_for_then_named_and_nothing_changes(ledger_file: Path) -> None:
    """A foreign program that locks the file costs its wait, an error, and no record (C99, I6)."""
    with ClaimLedger(ledger_file, busy_timeout_ms=50) as ledger:
        ledger.commit([held(C1, "c1", pod(P1, "p1"))])
        foreign = _python(
            """
            import sqlite3, sys
            connection = sqlite3.connect(sys.argv[1], isolation_level=None)
            connection.execute("BEGIN IMMEDIATE")
            print("locked", flush=True)
            sys.stdin.read()
            """,
            ledger_file,
        )
        assert foreign.stdout is not None
        assert foreign.stdout.readline() == "locked\n"
        with pytest.raises(LedgerBusyError, match="another process keeps it locked") as caught:
            ledger.commit([held(C2, "c2", pod(P1, "p1"))])
        assert caught.value.retryable
        assert [record.ref.uid for record in ledger.all()] == [C1]
        foreign.communicate()
        ledger.commit([held(C2, "c2", pod(P1, "p1"))])
        assert len(ledger.all()) == 2


def test_a_full_disk_refuses_the_commit_and_recovers_without_a_restart(ledger_file: Path) -> None:
    """Out of space is said in words, changes nothing in memory, and passes (C93, I6)."""
    with ClaimLedger(ledger_file) as ledger:
        ledger.commit([held(C1, "c1", pod(P1, "p1"))])
        raw = raw_connection(ledger._commits._connection)
        pages = raw.execute("PRAGMA page_count").fetchone()[0]
        raw.execute(f"PRAGMA max_page_count = {pages}")
        big = [Event(EventKind.REFUSED, T0, detail="x" * 1000)] * 50
        with pytest.raises(LedgerUnwritableError, match="no space left") as caught:
            ledger.commit([held(C2, "c2", pod(P1, "p1"))], big)
        assert caught.value.retryable
        assert [record.ref.uid for record in ledger.all()] == [C1]
        with open_ledger(ledger_file) as reader:
            assert len(reader.claims()) == 1
        raw.execute("PRAGMA max_page_count = 1073741823")
        ledger.commit([held(C2, "c2", pod(P1, "p1"))], big)
        assert len(ledger.all()) == 2


def test_a_folder_that_is_missing_is_said_so(tmp_path: Path) -> None:
    """The remedy names the folder, and no file is left anywhere."""
    with pytest.raises(LedgerUnwritableError, match="check that the folder exists"):
        ClaimLedger(tmp_path / "nowhere" / "ledger.db")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_the_place_of_the_file_is_said_so(tmp_path: Path) -> None:
    """A path that SQLite cannot open is an error in words, and the lock is given back."""
    path = tmp_path / "ledger.db"
    path.mkdir()
    with pytest.raises(LedgerError, match="cannot be"):
        ClaimLedger(path)
    assert not is_in_use(path)


def test_a_folder_that_this_user_may_not_write_is_said_so(tmp_path: Path) -> None:
    """No permission is one clear error; root is not stopped by modes, so another user tries."""
    folder = tmp_path / "state"
    folder.mkdir(mode=0o555)
    if os.geteuid() != 0:
        with pytest.raises(LedgerUnwritableError, match="belongs to this user"):
            ClaimLedger(folder / "ledger.db")
        return
    code = """
        import os, sys, pathlib
        import drastate.ledger.schema, drastate.ledger.rows  # while root may still read it
        from drastate.errors import LedgerUnwritableError
        from drastate.ledger.claims import ClaimLedger
        os.chdir(sys.argv[1])
        os.setgroups([])
        os.setuid(65534)
        try:
            ClaimLedger(pathlib.Path("ledger.db"))
        except LedgerUnwritableError as error:
            print(error)
    """
    child = _python(code, folder)
    said, _ = child.communicate()
    assert "belongs to this user" in said


def test_a_file_system_without_wal_is_refused(
    ledger_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal mode that is in force is looked at, not the one that was asked for (C97)."""
    real = sqlite3.connect

    class Stubborn(sqlite3.Connection):
        def execute(self, sql: str, *parameters: object) -> sqlite3.Cursor:  # type: ignore[override]
            if "journal_mode" in sql:
                sql = "SELECT 'delete'"
            return super().execute(sql, *parameters)  # type: ignore[arg-type]

    monkeypatch.setattr(sqlite3, "connect", lambda *a, **k: real(*a, factory=Stubborn, **k))
    with pytest.raises(LedgerUnwritableError, match="put the state folder on a local disk"):
        ClaimLedger(ledger_file)
    monkeypatch.undo()
    assert not is_in_use(ledger_file)
    ClaimLedger(ledger_file).close()


def test_what_dies_without_closing_is_whole_at_the_next_open(ledger_file: Path) -> None:
    """A killed manager's log holds what was committed, and the next one reads it (C94)."""
    child = _python(
        """
        import os, sys, pathlib, signal
        sys.path.insert(0, sys.argv[2])
        from ledger_samples import held, pod, P1
        from drastate.ledger.claims import ClaimLedger
        ledger = ClaimLedger(pathlib.Path(sys.argv[1]))
        for number in range(50):
            ledger.commit([held(f"uid-{number}", f"c{number}", pod(P1, "p1"))])
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        ledger_file,
        Path(__file__).parents[1],
    )
    child.communicate()
    assert child.returncode == -9
    with ClaimLedger(ledger_file) as ledger:
        assert len(ledger.all()) == 50


def test_a_state_folder_stands_for_its_ledger(tmp_path: Path) -> None:
    """A folder means the ledger in it, a file itself."""
    assert ledger_path(tmp_path) == tmp_path / "ledger.db"
    assert ledger_path(tmp_path / "copy.db") == tmp_path / "copy.db"
    assert lock_path(tmp_path / "copy.db") == tmp_path / "copy.db.lock"


@pytest.mark.parametrize("content", [b"hello, this is a text file\n" * 100, b"\0" * 8192])
def test_what_is_no_database_is_refused_and_kept(ledger_file: Path, content: bytes) -> None:
    """A manager that is given another file says so and leaves every byte of it."""
    ledger_file.write_bytes(content)
    with pytest.raises(LedgerCorruptError):
        ClaimLedger(ledger_file)
    assert ledger_file.read_bytes() == content
    with pytest.raises(LedgerCorruptError):
        open_ledger(ledger_file)
    ledger_file.unlink()


def test_another_programs_database_is_refused_and_kept(ledger_file: Path) -> None:
    """An SQLite database that is no ledger gets no table of ours."""
    foreign = sqlite3.connect(ledger_file)
    foreign.execute("CREATE TABLE theirs (x)")
    foreign.commit()
    foreign.close()
    with pytest.raises(LedgerCorruptError, match="not a claim ledger"):
        ClaimLedger(ledger_file)
    with pytest.raises(LedgerCorruptError, match="not a claim ledger"):
        open_ledger(ledger_file)
    foreign = sqlite3.connect(ledger_file)
    assert foreign.execute("SELECT name FROM sqlite_master").fetchall() == [("theirs",)]
    foreign.close()
    ledger_file.unlink()


def test_a_missing_ledger_is_not_made_by_looking(tmp_path: Path) -> None:
    """A reader makes nothing."""
    with pytest.raises(UsageError, match="there is no claim ledger"):
        open_ledger(tmp_path / "ledger.db")
    with pytest.raises(LedgerError):
        open_reader(tmp_path / "ledger.db")
    assert list(tmp_path.iterdir()) == []
