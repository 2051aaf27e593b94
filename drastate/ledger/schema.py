"""Brings a ledger to the schema of this code, or says why not."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy.engine import Connection

from drastate.errors import LedgerCorruptError, LedgerNeedsUpgradeError, LedgerTooNewError
from drastate.ledger.engine import raw_connection, sqlite_errors, sync
from drastate.ledger.tables import APPLICATION_ID, SCHEMA_REVISION, metadata

_log = logging.getLogger(__name__)


def migrations_path() -> Path:
    """The folder of Alembic revisions: the packaged one, or the repository's in a checkout."""
    package = Path(__file__).resolve().parents[1]
    repository = package.parent / "migrations"
    packaged = package / "_migrations"
    return packaged if packaged.is_dir() else repository


def read_revision(connection: Connection, path: Path) -> str | None:
    """The schema revision of an open ledger; None for a database without any table.

    Raises:
        LedgerCorruptError: it is an SQLite database, but not a claim ledger.
    """
    with sqlite_errors(path):
        names = {
            row[0]
            for row in connection.exec_driver_sql("SELECT name FROM sqlite_master").fetchall()
        }
        if not names:
            return None
        application = connection.exec_driver_sql("PRAGMA application_id").scalar_one()
        revision = (
            connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar()
            if "alembic_version" in names
            else None
        )
    if application != APPLICATION_ID or revision is None:
        raise LedgerCorruptError(
            f"{path} is an SQLite database, but not a claim ledger; name the ledger of a state"
            " folder (ledger.db)",
            path=str(path),
        )
    return str(revision)


def require_current(connection: Connection, path: Path) -> None:
    """For readers: refuses every schema but this code's.

    Raises:
        LedgerCorruptError: not a claim ledger, or one that was never finished.
        LedgerNeedsUpgradeError: an older one.
        LedgerTooNewError: a newer one.
    """
    revision = read_revision(connection, path)
    if revision is None:
        raise LedgerCorruptError(
            f"{path} is empty: no claim ledger was ever written to it", path=str(path)
        )
    _refuse_newer(revision, path)
    if revision != SCHEMA_REVISION:
        raise LedgerNeedsUpgradeError(
            f"claim ledger {path} has schema {revision}, this drastate reads {SCHEMA_REVISION};"
            " a manager upgrades it when it opens it; for a copy, use the drastate that wrote it",
            path=str(path),
        )


def bring_up_to_date(
    connection: Connection,
    path: Path,
    *,
    migrations: Path | None = None,
    head: str = SCHEMA_REVISION,
) -> None:
    """For the writer: creates the schema, or upgrades an older one after a backup.

    Everything happens in one transaction with the version row: a death at any statement leaves the
    old schema or the new one.

    Args:
        connection: the writer's.
        path: the database file, for texts and the backup beside it.
        migrations: the folder of revisions, for tests.
        head: the revision to reach, for tests.

    Raises:
        LedgerTooNewError: written by a newer drastate.
        LedgerCorruptError: not a claim ledger.
        LedgerError: the upgrade failed; nothing changed.
    """
    revision = read_revision(connection, path)
    connection.rollback()
    if revision == head:
        return
    if revision is not None:
        _refuse_newer(revision, path, head)
        copy = _back_up(connection, path, revision)
        _log.info(
            "upgrading the claim ledger after a backup",
            extra={"from_revision": revision, "to_revision": head, "backup": str(copy)},
        )
    with sqlite_errors(path), _alembic_logs_here(), connection.begin():
        _run_alembic(connection, migrations or migrations_path(), head)
        connection.exec_driver_sql(f"PRAGMA application_id = {APPLICATION_ID}")


def _refuse_newer(revision: str, path: Path, head: str = SCHEMA_REVISION) -> None:
    if revision > head or not revision.isdigit():
        raise LedgerTooNewError(
            f"claim ledger {path} has schema {revision}, newer than this drastate knows"
            f" ({head}); run the drastate that wrote it, or restore the backup it made beside"
            " the ledger before it upgraded",
            path=str(path),
        )


def _run_alembic(connection: Connection, migrations: Path, head: str) -> None:
    # Only a new or an old ledger needs it, and importing it costs more than opening the ledger.
    from alembic import command  # noqa: PLC0415
    from alembic.config import Config  # noqa: PLC0415

    config = Config()
    config.set_main_option("script_location", str(migrations).replace("%", "%%"))
    config.attributes["connection"] = connection
    config.attributes["target_metadata"] = metadata
    command.upgrade(config, head)


@contextmanager
def _alembic_logs_here() -> Iterator[None]:
    """Alembic's log lines appear under our logger, at debug level, while the block runs.

    A host that embeds us did not ask for Alembic's lines, and its own logging must not change.
    """
    theirs = logging.getLogger("alembic")
    before = theirs.propagate
    handler = _Forward()
    theirs.addHandler(handler)
    theirs.propagate = False
    try:
        yield
    finally:
        theirs.propagate = before
        theirs.removeHandler(handler)


class _Forward(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _log.debug("%s", record.getMessage())


def _back_up(connection: Connection, path: Path, revision: str) -> Path:
    """Copies the ledger beside itself by SQLite's backup API, complete or not at all."""
    target = path.with_name(f"{path.name}.schema-{revision}.bak")
    partial = target.with_name(target.name + ".partial")
    partial.unlink(missing_ok=True)
    os.close(os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    source = raw_connection(connection)
    with sqlite_errors(path):
        copy = sqlite3.connect(partial)
        try:
            source.backup(copy)
        finally:
            copy.close()
    sync(partial)
    partial.rename(target)
    sync(target.parent)
    return target
