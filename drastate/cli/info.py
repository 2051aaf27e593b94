"""``drastate info``."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import click

from drastate.cli import output
from drastate.cli.options import inspects, opened
from drastate.clock import SystemClock
from drastate.ledger.views import LedgerInfo

_MIB = 1024 * 1024


@click.command
@inspects
def info(*, ledger: Path, form: str) -> None:
    """Show what a ledger is, of which node, and whether a manager has it open."""
    with opened(ledger) as reader:
        found = reader.info()
        boot = boot_text(found.boot_id, SystemClock().boot_id())
        note = sqlite_note(sqlite3.sqlite_version_info)
        if form == "table":
            _write(found, boot, note)
        else:
            data = {
                **output.to_mapping(found),
                "closed_cleanly": found.was_closed_cleanly,
                "boot": boot,
                "sqlite_version": sqlite3.sqlite_version,
                "sqlite_note": note,
            }
            output.write_data(data, form)


def boot_text(then: str | None, now: str | None) -> str:
    """Whether the ledger was opened in the boot this machine is in: same, other or unknown."""
    if then is None or now is None:
        return "unknown"
    return "same" if then == now else "other"


def sqlite_note(version: tuple[int, ...]) -> str | None:
    """What there is to know about a version of SQLite; None when nothing.

    Source: sqlite.org/releaselog/3_51_3.html; the fix was carried back to 3.44.6 and 3.50.7.
    """
    fixed = (
        version >= (3, 51, 3)
        or (3, 50, 7) <= version < (3, 51)
        or (3, 44, 6) <= version < (3, 45)
        or version < (3, 7)
    )
    if fixed:
        return None
    return (
        "this SQLite can lose a commit when two connections write and checkpoint at once; drastate"
        " has one writer, so keep other programs from opening a live ledger for writing"
    )


def _write(found: LedgerInfo, boot: str, note: str | None) -> None:
    counts = ", ".join(f"{count} {status}" for status, count in found.claims.items())
    output.write_fields(
        [
            ("Ledger", str(found.path)),
            ("UUID", found.uuid or output.NONE),
            ("Node", found.node_name or output.NONE),
            ("Schema", found.schema_revision),
            ("State", _state(found)),
            ("Created", output.moment(found.created_at)),
            ("Opened", output.moment(found.opened_at)),
            ("Last clean stop", output.moment(found.last_clean_stop)),
            ("Boot", f"{boot} ({found.boot_id or 'not recorded'})"),
            ("Size", _sizes(found)),
            ("Claims", counts or "0"),
            ("Pods", str(found.pods)),
            ("Events", _events(found)),
            ("SQLite", f"{sqlite3.sqlite_version}{f' ({note})' if note else ''}"),
        ]
    )


def _state(found: LedgerInfo) -> str:
    if found.in_use:
        return f"in use by pid {found.pid or 'unknown'}"
    return "closed" if found.was_closed_cleanly else "not in use, but not closed by its manager"


def _sizes(found: LedgerInfo) -> str:
    text = f"{found.size_bytes / _MIB:.1f} MiB"
    if found.wal_size_bytes is not None:
        text += f" and {found.wal_size_bytes / _MIB:.1f} MiB in the write-ahead log"
    return text


def _events(found: LedgerInfo) -> str:
    if not found.events:
        return "0"
    first, last = output.moment(found.first_event_at), output.moment(found.last_event_at)
    return f"{found.events}, {first} to {last}"
