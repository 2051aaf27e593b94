"""Opens a ledger for inspection without leaving a trace beside it.

A live ledger is read in place: its manager has made -wal and -shm already. Anything else is
evidence: SQLite would make -wal and -shm beside it and leave them there (and could not where the
folder is read-only), so the files are copied to a private folder and the copy is read.
"""

from __future__ import annotations

import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy.engine import Connection

from drastate.errors import (
    LedgerBusyError,
    LedgerCorruptError,
    LedgerError,
    LedgerNeedsUpgradeError,
    LedgerUnwritableError,
    UsageError,
)
from drastate.ledger.engine import (
    LEDGER_FILE,
    is_in_use,
    ledger_path,
    open_reader,
    raw_connection,
    sqlite_errors,
)
from drastate.ledger.schema import read_revision, require_current

_MAGIC = b"SQLite format 3\0"

#: The header byte that says "needs a write-ahead log". Source: SQLite file format, section 1.3.
_READ_VERSION_AT = 19
_WAL_VERSION = 2

#: How long a manager that is just opening its ledger may take to finish the schema. Arbitrary; an
#: upgrade copies the file first.
_STARTING_S = 3.0
_POLL_S = 0.02

#: How often a copy is tried while the files change under it.
_COPY_TRIES = 3


class Evidence:
    """An open ledger and where it came from. `close` removes the private copy, if there is one.

    Attributes:
        path: the database file that was named.
        connection: read-only, to it or to the copy.
        live: a manager has the ledger open.
        has_wal: there was a write-ahead log beside it.
    """

    def __init__(self, path: Path) -> None:
        """Opens what ``path`` means: a state folder or a database file.

        Raises:
            UsageError: there is no such file.
            LedgerCorruptError: not a ledger, or damaged.
            LedgerTooNewError: written by a newer drastate.
            LedgerNeedsUpgradeError: written by an older one.
            LedgerBusyError: it changes faster than it can be copied.
            LedgerError: it cannot be read.
        """
        self.path = _find(path)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        deadline = time.monotonic() + _STARTING_S
        while True:
            self.live = is_in_use(self.path)
            try:
                self.connection = self._open()
            except (LedgerCorruptError, LedgerNeedsUpgradeError, FileNotFoundError) as error:
                if self.live and time.monotonic() < deadline:
                    time.sleep(_POLL_S)  # its manager is just making it, or upgrading it
                    continue
                if isinstance(error, FileNotFoundError):
                    raise _missing(path) from None
                raise
            except OSError as error:
                raise _unreadable(self.path, error) from error
            return

    def _open(self) -> Connection:
        if self.live:
            _refuse_other_kinds(self.path)
            self.has_wal = wal_path(self.path).exists()
            return _connect(self.path, self.path)
        _refuse_foreign(self.path)
        self._folder = tempfile.TemporaryDirectory(prefix="drastate-")
        try:
            copy = _copy(self.path, Path(self._folder.name))
            self.has_wal = wal_path(copy).exists()
            return _connect(copy, self.path, lacks_wal=not self.has_wal and _needs_wal(copy))
        except BaseException:
            self._folder.cleanup()
            raise

    def close(self) -> None:
        """Closes the connection and removes the copy. Idempotent."""
        close_connection(self.connection)
        if self._folder is not None:
            self._folder.cleanup()


def close_connection(connection: Connection) -> None:
    """Closes a connection of `open_reader` for good."""
    engine = connection.engine
    connection.close()
    engine.dispose()


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns what can go wrong in a read into the ledger's errors, in a reader's words.

    Raises:
        LedgerBusyError: the file stayed locked.
        LedgerCorruptError: damaged; also when a table or column is missing that its revision has.
        LedgerError: it cannot be read.
    """
    try:
        with sqlite_errors(path):
            yield
    except LedgerUnwritableError as error:
        raise LedgerError(
            f"claim ledger {path} cannot be read ({_cause(error)}); check the file's owner and"
            " mode, and that the disk is well",
            path=str(path),
        ) from error
    except LedgerError as error:
        if type(error) is not LedgerError:
            raise
        raise LedgerCorruptError(
            f"claim ledger {path} is damaged: {_cause(error)}; it is kept as it is: restore a copy",
            path=str(path),
        ) from error


def _cause(error: BaseException) -> str:
    """What SQLite says, without SQLAlchemy's words around it."""
    cause = error.__cause__
    return str(getattr(cause, "orig", cause))


def _find(path: Path) -> Path:
    try:
        # The -wal of a database that is reached by a symbolic link lies beside the database.
        return ledger_path(path).resolve()
    except (OSError, RuntimeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error


def _missing(path: Path) -> UsageError:
    if path.is_dir():
        return UsageError(
            f"there is no claim ledger ({LEDGER_FILE}) in folder {path}; name a state folder or a"
            " ledger file with --ledger"
        )
    return UsageError(
        f"there is no claim ledger at {path}; name a state folder or a ledger file with --ledger"
    )


def _connect(file: Path, named: Path, *, lacks_wal: bool = False) -> Connection:
    with reading(named):
        connection = open_reader(file)
    try:
        with reading(named):
            # Reads alone, whatever a statement says.
            raw_connection(connection).execute("PRAGMA query_only = ON")
            if lacks_wal:
                _refuse_emptied(connection, named)
            require_current(connection, named)
            connection.rollback()
    except BaseException:
        close_connection(connection)
        raise
    return connection


def _refuse_emptied(connection: Connection, named: Path) -> None:
    """A young ledger lies whole in its -wal: the main file alone looks as if it were empty."""
    if read_revision(connection, named) is None:
        raise LedgerCorruptError(
            f"claim ledger {named} holds nothing without its write-ahead log; copy"
            f" {wal_path(named).name} along with it, or stop the manager before copying",
            path=str(named),
        )


def _refuse_other_kinds(path: Path) -> None:
    # A pipe would block for ever, a device never end.
    if not stat.S_ISREG(path.stat().st_mode):
        raise LedgerCorruptError(f"{path} is not a file, so no claim ledger", path=str(path))


def _refuse_foreign(path: Path) -> None:
    """Says early what is no SQLite database at all: a huge log file is not copied first."""
    _refuse_other_kinds(path)
    with path.open("rb") as file:
        header = file.read(len(_MAGIC))
    if not header:
        raise LedgerCorruptError(
            f"{path} is empty: no claim ledger was ever written to it", path=str(path)
        )
    if header != _MAGIC:
        raise LedgerCorruptError(
            f"{path} is not an SQLite database, so no claim ledger; name the ledger of a state"
            f" folder ({LEDGER_FILE})",
            path=str(path),
        )


def _needs_wal(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(_READ_VERSION_AT + 1)[_READ_VERSION_AT:] == bytes([_WAL_VERSION])


def _copy(source: Path, folder: Path) -> Path:
    """Copies a database that nobody has open, and its -wal when there is one.

    Raises:
        FileNotFoundError: it is not there (any more).
        LedgerBusyError: somebody writes to it all the same.
        OSError: it cannot be read, or there is no room for a copy.
    """
    wal = wal_path(source)
    for number in range(_COPY_TRIES):
        target = folder / str(number) / LEDGER_FILE
        target.parent.mkdir()
        before = _stamp(source), _stamp(wal)
        try:
            shutil.copyfile(source, target)
            if before[1] is not None:
                shutil.copyfile(wal, wal_path(target))
        except FileNotFoundError:
            if not source.exists():
                raise
            continue
        if (_stamp(source), _stamp(wal)) == before:
            return target
    raise LedgerBusyError(
        f"claim ledger {source} changes while it is being copied; try again", path=str(source)
    )


def _unreadable(path: Path, error: OSError) -> LedgerError:
    where = f" ({error.filename2 or error.filename})" if error.filename else ""
    return LedgerError(
        f"claim ledger {path} cannot be read or copied: {error.strerror}{where}; a copy needs room"
        f" in {tempfile.gettempdir()} (set TMPDIR for another place)",
        path=str(path),
    )


def wal_path(path: Path) -> Path:
    """The write-ahead log of the database ``path``."""
    return path.with_name(path.name + "-wal")


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
