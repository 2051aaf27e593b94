"""Opens SQLite; nothing else in the process does.

There are two ways in. `open_writer` gives the one connection that writes and checkpoints, behind a
lock file. `open_reader` gives a read-only connection for inspection.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import create_engine, event
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import StaticPool

from drastate.errors import (
    InternalError,
    LedgerBusyError,
    LedgerCorruptError,
    LedgerError,
    LedgerUnwritableError,
)

#: Name of the ledger in a state folder.
LEDGER_FILE = "ledger.db"

#: How every write transaction begins (see `open_writer`).
BEGIN = "BEGIN IMMEDIATE"

#: SQLite's primary result codes (the low byte of the extended ones) by what they mean for us.
_PRIMARY = 0xFF
_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL}
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_UNWRITABLE = {
    sqlite3.SQLITE_FULL: "no space left on the disk; free some, nothing needs a restart",
    sqlite3.SQLITE_READONLY: "it is read-only; check the mount and the file's owner and mode",
    sqlite3.SQLITE_IOERR: "the disk reports an I/O error; see the kernel log, then restart",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened; check that the folder exists and its mode",
    sqlite3.SQLITE_PERM: "permission denied; check the file's owner and mode",
    sqlite3.SQLITE_AUTH: "permission denied; check the file's owner and mode",
}


def ledger_path(path: Path) -> Path:
    """The database file that ``path`` means: itself, or the ledger in a state folder."""
    return path / LEDGER_FILE if path.is_dir() else path


def lock_path(path: Path) -> Path:
    """The writer's lock file of the database ``path``."""
    return path.with_name(path.name + ".lock")


class WriterLock:
    """The right to write one ledger, held until `release` or the death of the process.

    The kernel drops the lock with the process, so a crash leaves nothing to clean up. The file
    stays: unlinking it would let two processes hold locks on two files of one name.
    """

    def __init__(self, path: Path) -> None:
        """Takes the lock.

        Args:
            path: the database file.

        Raises:
            LedgerBusyError: another manager holds it; the text gives its pid.
            LedgerUnwritableError: the lock file cannot be made.
        """
        self._fd = -1
        lock_file = lock_path(path)
        try:
            fd = os.open(lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise LedgerUnwritableError(
                f"claim ledger {path}: cannot make its lock file {lock_file}: {error.strerror};"
                " check that the folder exists and belongs to this user",
                path=str(path),
            ) from error
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK))
        except OSError as error:
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
            os.close(fd)
            pid = int(holder) if holder.isdigit() else None
            raise LedgerBusyError(
                f"claim ledger {path} is already in use by pid {holder or 'unknown'};"
                " one manager writes a ledger, so stop that process or use another state folder",
                path=str(path),
                pid=pid,
            ) from error
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._fd = fd

    def release(self) -> None:
        """Gives the lock back; does nothing the second time."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def is_in_use(path: Path) -> bool:
    """Whether a manager has the database ``path`` open. Never waits, creates and locks nothing."""
    try:
        fd = os.open(lock_path(path), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _flock(fcntl.F_RDLCK))
    finally:
        os.close(fd)
    lock_type: int = _FLOCK.unpack(found)[0]
    return lock_type != fcntl.F_UNLCK


#: C's ``struct flock``: type, whence, start, length (0: to the end), pid (0, as OFD locks demand).
_FLOCK = struct.Struct("@hhqqi0q")


def _flock(lock_type: int) -> bytes:
    # An open-file-description lock: it goes with the last descriptor, and, unlike flock, it can be
    # asked about without being taken, so a reader never keeps a manager out.
    return _FLOCK.pack(lock_type, os.SEEK_SET, 0, 0, 0)


@contextmanager
def sqlite_errors(path: Path) -> Iterator[None]:
    """Turns SQLite's errors, bare or wrapped by SQLAlchemy, into the ledger's own.

    Raises:
        LedgerBusyError: another process kept the file locked.
        LedgerCorruptError: not a database, or a damaged one.
        LedgerUnwritableError: disk full, read-only, I/O error, permissions.
        LedgerError: anything else that SQLite says.
        InternalError: a statement of ours is wrong, or breaks a constraint.
    """
    try:
        yield
    except DBAPIError as error:
        cause = error.orig if isinstance(error.orig, sqlite3.Error) else error
        raise _ledger_error(cause, path) from error
    except sqlite3.Error as error:
        raise _ledger_error(error, path) from error


def _ledger_error(error: BaseException, path: Path) -> LedgerError | InternalError:
    if isinstance(error, sqlite3.ProgrammingError | sqlite3.IntegrityError):
        return InternalError(f"claim ledger {path}: {error}; nothing was written; please report it")
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & _PRIMARY
    name = getattr(error, "sqlite_errorname", type(error).__name__)
    if code in _BUSY:
        return LedgerBusyError(
            f"claim ledger {path}: another process keeps it locked ({name}); readers must open it"
            f" with mode=ro and short transactions; `fuser {path}` shows who has it open",
            path=str(path),
        )
    if code in _DAMAGED:
        return LedgerCorruptError(
            f"claim ledger {path}: {error} ({name}); it is kept as it is: check that this is the"
            " right file, or move it away and restore a copy",
            path=str(path),
        )
    if code in _UNWRITABLE:
        return LedgerUnwritableError(
            f"claim ledger {path} cannot be written: {_UNWRITABLE[code]} ({name})", path=str(path)
        )
    return LedgerError(f"claim ledger {path}: {error} ({name})", path=str(path))


def open_writer(path: Path, *, busy_timeout_ms: int) -> tuple[Engine, Connection]:
    """Opens the one connection that may write; the caller holds the `WriterLock`.

    Args:
        path: the database file; made (mode 0600) when it is missing.
        busy_timeout_ms: how long a write waits for a foreign lock.

    Returns:
        The engine, to be disposed of at the end, and its only connection.

    Raises:
        LedgerError: as `sqlite_errors`.
    """
    _create_private(path)
    engine = create_engine(
        "sqlite://",
        # One connection for the life of the ledger, whichever thread leads a commit.
        poolclass=StaticPool,
        creator=lambda: _connect_writer(path, busy_timeout_ms),
    )
    # SQLite takes the write lock at BEGIN and not at the first write: a transaction that reads
    # first could not be upgraded, and would fail at once whatever the busy timeout
    # (SQLITE_BUSY_SNAPSHOT).
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(BEGIN))
    with sqlite_errors(path):
        try:
            return engine, engine.connect()
        except BaseException:
            engine.dispose()
            raise


def _create_private(path: Path) -> None:
    # Made before SQLite opens it, so that there is no moment in which others could read it; SQLite
    # gives -wal and -shm the mode of the database.
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        # A file whose name is lost with the power is lost whole; so is the folder's own name.
        sync(path.parent)
        sync(path.absolute().parent.parent)
    except FileExistsError:
        return
    except OSError as error:
        raise LedgerUnwritableError(
            f"claim ledger {path} cannot be made: {error.strerror}; check that the folder exists"
            " and belongs to this user",
            path=str(path),
        ) from error


def sync(path: Path) -> None:
    """Returns when a file, or the names in a folder, are on the disk.

    Raises:
        OSError: they are not.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _connect_writer(path: Path, busy_timeout_ms: int) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path,
        # Python's own transaction handling commits DDL at once and begins too late; ours is
        # explicit.
        isolation_level=None,
        # The commit leader can be any thread; the leader's turn is exclusive.
        check_same_thread=False,
        timeout=busy_timeout_ms / 1000,
        # Every statement of ours fits; preparing one anew costs as much as running it.
        cached_statements=256,
    )
    try:
        mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise LedgerUnwritableError(  # noqa: TRY301 (the connection is closed below)
                f"claim ledger {path}: the file system does not allow write-ahead logging"
                f" (journal mode is {mode}); put the state folder on a local disk",
                path=str(path),
            )
        # A commit returns when it is on the disk, not when it is in a cache.
        connection.execute("PRAGMA synchronous = FULL")
        # Moving the log into the database costs two more syncs; done every 16 MB it is rare.
        connection.execute("PRAGMA wal_autocheckpoint = 4000")
        # Outside a transaction: inside one SQLite ignores this without a word.
        connection.execute("PRAGMA foreign_keys = ON")
    except BaseException:
        connection.close()
        raise
    return connection


def raw_connection(connection: Connection) -> sqlite3.Connection:
    """The SQLite connection beneath, for what SQLAlchemy has no words for: pragmas, backup."""
    raw = connection.connection.driver_connection
    if not isinstance(raw, sqlite3.Connection):
        raise TypeError(f"the ledger's driver is {type(raw)}, not sqlite3")
    return raw


def open_reader(path: Path) -> Connection:
    """Opens ``path`` for reading; never writes to it, never makes it.

    Raises:
        LedgerError: as `sqlite_errors`.
    """
    engine = create_engine(
        "sqlite://",
        poolclass=StaticPool,
        creator=lambda: sqlite3.connect(
            f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None, timeout=5.0
        ),
    )
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    with sqlite_errors(path):
        try:
            return engine.connect()
        except BaseException:
            engine.dispose()
            raise
