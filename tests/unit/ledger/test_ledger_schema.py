"""The schema comes from the migrations alone, whole or not at all."""

from __future__ import annotations

import logging
import shutil
import sqlite3
import textwrap
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from ledger_samples import C1, SteeredClock, write_sample

from drastate.errors import (
    LedgerCorruptError,
    LedgerError,
    LedgerNeedsUpgradeError,
    LedgerTooNewError,
)
from drastate.ledger import tables
from drastate.ledger.claims import ClaimLedger
from drastate.ledger.engine import open_reader, open_writer
from drastate.ledger.reader import open_ledger
from drastate.ledger.schema import bring_up_to_date, migrations_path, read_revision

#: The revision after the newest, as the tests' own migrations are.
_NEXT = f"{int(tables.SCHEMA_REVISION) + 1:04}"
_GOOD = """
    def upgrade():
        op.add_column("claims", sa.Column("note", sa.Text))
        op.execute("UPDATE claims SET note = name")
"""
_BAD = """
    def upgrade():
        op.create_table("half", sa.Column("id", sa.Integer, primary_key=True))
        op.drop_table("devices")
        raise RuntimeError("the second half does not work")
"""
_BAD_SQL = """
    def upgrade():
        op.create_table("half", sa.Column("id", sa.Integer, primary_key=True))
        op.execute("INSERT INTO nowhere VALUES (1)")
"""


def _migrations(folder: Path, upgrade: str) -> Path:
    """Our migrations and one more."""
    target = folder / "migrations"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(migrations_path(), target, ignore=shutil.ignore_patterns("__pycache__"))
    head = f'import sqlalchemy as sa\nfrom alembic import op\n\nrevision = "{_NEXT}"\n'
    text = f'{head}down_revision = "{tables.SCHEMA_REVISION}"\n{textwrap.dedent(upgrade)}'
    (target / "versions" / f"{_NEXT}_next.py").write_text(text, encoding="utf-8")
    return target


def _upgrade(path: Path, migrations: Path) -> None:
    engine, connection = open_writer(path, busy_timeout_ms=1_000)
    try:
        bring_up_to_date(connection, path, migrations=migrations, head=_NEXT)
    finally:
        connection.close()
        engine.dispose()


def _dump(path: Path) -> list[str]:
    connection = sqlite3.connect(path)
    try:
        return list(connection.iterdump())
    finally:
        connection.close()


def _counts(path: Path) -> dict[str, int]:
    connection = sqlite3.connect(path)
    try:
        return {
            name: connection.execute(f"SELECT count(*) FROM {name}").fetchone()[0]
            for name in tables.metadata.tables
        }
    finally:
        connection.close()


def test_the_migrations_make_the_tables_of_the_code(ledger_file: Path) -> None:
    """What `alembic check` would say: nothing to do between the revisions and tables.py."""
    ClaimLedger(ledger_file).close()
    connection = open_reader(ledger_file)
    try:
        context = MigrationContext.configure(
            connection, opts={"compare_type": True, "compare_server_default": True}
        )
        assert compare_metadata(context, tables.metadata) == []
    finally:
        connection.close()
        connection.engine.dispose()


def test_the_migrations_make_the_constraints_of_the_code(tmp_path: Path, ledger_file: Path) -> None:
    """Checks, foreign keys and WITHOUT ROWID too, which Alembic does not compare."""
    ClaimLedger(ledger_file).close()
    plain = tmp_path / "plain.db"
    engine, connection = open_writer(plain, busy_timeout_ms=1_000)
    with connection.begin():
        tables.metadata.create_all(connection)
    connection.close()
    engine.dispose()

    def schema(path: Path) -> dict[str, str]:
        database = sqlite3.connect(path)
        rows = database.execute(
            "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"
            " AND name NOT IN ('alembic_version', 'sqlite_sequence')"
        ).fetchall()
        database.close()
        return {name: " ".join(sql.split()) for name, sql in rows}

    assert schema(ledger_file) == schema(plain)


def test_the_code_knows_the_newest_revision() -> None:
    """There is one head, it is SCHEMA_REVISION, and revisions are numbers that sort."""
    script = ScriptDirectory(str(migrations_path()))
    assert script.get_heads() == [tables.SCHEMA_REVISION]
    revisions = [each.revision for each in script.walk_revisions()]
    assert revisions == sorted(revisions, reverse=True)
    assert all(each.isdigit() and len(each) == 4 for each in revisions)


def test_no_migration_rebuilds_a_table_or_imports_ours() -> None:
    """A batch rebuild with foreign keys on would empty the children (C104)."""
    for path in migrations_path().rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "batch_alter_table" not in text, path
        assert "drastate" not in text, path


def test_a_new_ledger_is_marked_as_ours(ledger_file: Path) -> None:
    """Application id and revision are there, and no backup is made of nothing."""
    ClaimLedger(ledger_file).close()
    connection = open_reader(ledger_file)
    try:
        assert read_revision(connection, ledger_file) == tables.SCHEMA_REVISION
    finally:
        connection.close()
        connection.engine.dispose()
    assert not list(ledger_file.parent.glob("*.bak"))


def test_an_upgrade_keeps_every_row(ledger_file: Path, tmp_path: Path) -> None:
    """A populated ledger has as many rows in every table after an upgrade as before (C104)."""
    write_sample(ledger_file)
    before = _counts(ledger_file)
    _upgrade(ledger_file, _migrations(tmp_path, _GOOD))
    assert _counts(ledger_file) == before
    connection = sqlite3.connect(ledger_file)
    assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    assert connection.execute("SELECT version_num FROM alembic_version").fetchall() == [(_NEXT,)]
    assert {row[0] for row in connection.execute("SELECT note FROM claims")} == {
        "c1",
        "c2",
        "c3",
        "c4",
    }
    connection.close()
    ledger_file.unlink()  # newer than the check at the end knows


@pytest.mark.parametrize("upgrade", [_BAD, _BAD_SQL])
def test_a_failing_upgrade_changes_nothing_and_the_next_try_works(
    ledger_file: Path, tmp_path: Path, upgrade: str
) -> None:
    """Schema and version are as before, nothing half is left, a mended one runs (C105, C106)."""
    write_sample(ledger_file)
    before = _dump(ledger_file)
    with pytest.raises((RuntimeError, LedgerError)):
        _upgrade(ledger_file, _migrations(tmp_path, upgrade))
    assert _dump(ledger_file) == before
    with ClaimLedger(ledger_file) as ledger:
        assert ledger.all()
    _upgrade(ledger_file, _migrations(tmp_path, _GOOD))
    assert "note" in " ".join(_dump(ledger_file))
    ledger_file.unlink()


def test_a_failing_upgrade_is_a_ledger_error(ledger_file: Path, tmp_path: Path) -> None:
    """The caller gets an error of the ledger, with the cause, and not one of Alembic or SQLite."""
    write_sample(ledger_file)
    with pytest.raises(LedgerError, match="nowhere"):
        _upgrade(ledger_file, _migrations(tmp_path, _BAD_SQL))


def test_the_backup_before_an_upgrade_is_a_whole_ledger(ledger_file: Path, tmp_path: Path) -> None:
    """It holds what the ledger held, is private, and the old version can read it (C106)."""
    write_sample(ledger_file)
    before = _dump(ledger_file)
    _upgrade(ledger_file, _migrations(tmp_path, _GOOD))
    backup = ledger_file.with_name(f"ledger.db.schema-{tables.SCHEMA_REVISION}.bak")
    assert backup.stat().st_mode & 0o777 == 0o600
    assert _dump(backup) == before
    with open_ledger(backup) as reader:
        assert reader.claim(C1).name == "c1"
        assert reader.warnings == ()
    assert not list(ledger_file.parent.glob("*.partial"))
    ledger_file.unlink()


def test_what_a_killed_backup_left_is_no_obstacle(ledger_file: Path, tmp_path: Path) -> None:
    """A partial backup of a killed upgrade is made anew (C105)."""
    write_sample(ledger_file)
    ledger_file.with_name(f"ledger.db.schema-{tables.SCHEMA_REVISION}.bak.partial").write_bytes(
        b"half"
    )
    _upgrade(ledger_file, _migrations(tmp_path, _GOOD))
    assert not list(ledger_file.parent.glob("*.partial"))
    assert list(ledger_file.parent.glob("*.bak"))
    ledger_file.unlink()


def _set_revision(path: Path, revision: str) -> None:
    connection = sqlite3.connect(path)
    connection.execute("UPDATE alembic_version SET version_num = ?", (revision,))
    connection.commit()
    connection.close()


@pytest.mark.parametrize("revision", [_NEXT, "9999", "from-the-future"])
def test_a_newer_ledger_is_refused_and_kept(ledger_file: Path, revision: str) -> None:
    """Neither a manager nor a reader touches a ledger that a newer drastate wrote."""
    write_sample(ledger_file)
    _set_revision(ledger_file, revision)
    before = ledger_file.read_bytes()
    with pytest.raises(LedgerTooNewError, match="newer than this drastate knows") as caught:
        ClaimLedger(ledger_file)
    assert caught.value.exit_code == 2
    with pytest.raises(LedgerTooNewError):
        open_ledger(ledger_file)
    assert ledger_file.read_bytes() == before
    ledger_file.unlink()


def test_an_older_ledger_is_not_read_as_if_it_were_current(ledger_file: Path) -> None:
    """A reader cannot upgrade, and says who can."""
    write_sample(ledger_file)
    _set_revision(ledger_file, "0000")
    with pytest.raises(LedgerNeedsUpgradeError, match="a manager upgrades it"):
        open_ledger(ledger_file)
    ledger_file.unlink()


def test_an_empty_file_becomes_a_ledger_but_is_none_to_a_reader(ledger_file: Path) -> None:
    """A file of zero bytes, as a death right after creating it leaves, is not in the way."""
    ledger_file.touch(mode=0o600)
    with pytest.raises(LedgerCorruptError, match="is empty"):
        open_ledger(ledger_file)
    ClaimLedger(ledger_file).close()
    with open_ledger(ledger_file) as reader:
        assert reader.claims() == ()


def test_a_ledger_that_was_never_opened_to_the_end_can_be_read(ledger_file: Path) -> None:
    """A death between the schema and the ledger's own row leaves a ledger without claims."""
    engine, connection = open_writer(ledger_file, busy_timeout_ms=1_000)
    bring_up_to_date(connection, ledger_file)
    connection.close()
    engine.dispose()
    with open_ledger(ledger_file) as reader:
        assert reader.claims() == ()
        assert reader.info().uuid is None
    ClaimLedger(ledger_file).close()


def test_the_hosts_logging_is_not_touched(ledger_file: Path) -> None:
    """Handlers, levels and disabled flags of the host survive an open that migrates (C107)."""
    host = logging.getLogger("host.application")
    root, alembic = logging.getLogger(), logging.getLogger("alembic")
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(f"{record.name}: {record.getMessage()}")

    handler = Keep()
    root.addHandler(handler)
    level = root.level
    root.setLevel(logging.INFO)

    def state() -> list[object]:
        loggers = (host, root, alembic, logging.getLogger("sqlalchemy"))
        return [
            (each.level, each.disabled, each.propagate, tuple(each.handlers)) for each in loggers
        ]

    before = state()
    try:
        ClaimLedger(ledger_file).close()
        assert state() == before
        assert not [line for line in lines if line.startswith("alembic")]
        host.info("still here")
        assert "host.application: still here" in lines
    finally:
        root.removeHandler(handler)
        root.setLevel(level)


def test_opening_a_current_ledger_does_not_load_alembic(ledger_file: Path) -> None:
    """Only a new or an older ledger pays for Alembic."""
    import subprocess
    import sys

    write_sample(ledger_file, SteeredClock())
    code = (
        "import sys, pathlib; from drastate.ledger.claims import ClaimLedger;"
        "ClaimLedger(pathlib.Path(sys.argv[1])).close(); print('alembic' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(ledger_file)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
