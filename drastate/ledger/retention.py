"""Keeps the history bounded: a few rows at a time, so that no write waits long for it."""

from __future__ import annotations

from datetime import datetime, timedelta

from drastate.ledger import rows
from drastate.ledger.commit import Execute

#: Rows per batch. Arbitrary: removing that many takes a few milliseconds.
BATCH = 500


def prune(
    execute: Execute,
    *,
    now: datetime,
    tombstone_days: float,
    tombstones_max: int,
    events_max: int,
) -> int:
    """Removes at most `BATCH` tombstones and `BATCH` events.

    A tombstone goes by age or by count, oldest first, whatever the clock says: after a jump of the
    clock the count still holds, and a tombstone "from the future" ages like any other.

    Args:
        execute: runs a statement in the current transaction.
        now: the present.
        tombstone_days: tombstones older than this go.
        tombstones_max: so many tombstones stay at most.
        events_max: so many events stay at most.

    Returns:
        How many rows were removed.
    """
    before = rows.to_text(now - timedelta(days=tombstone_days))
    by_age = execute(
        "DELETE FROM claims WHERE uid IN (SELECT uid FROM claims WHERE status = 'UNPREPARED'"
        " AND changed_at < :before ORDER BY changed_at LIMIT :batch)",
        {"before": before, "batch": BATCH},
    ).rowcount
    by_count = execute(
        "DELETE FROM claims WHERE uid IN (SELECT uid FROM claims WHERE status = 'UNPREPARED'"
        " ORDER BY changed_at LIMIT max(0, min(:batch, (SELECT count(*) FROM claims"
        " WHERE status = 'UNPREPARED') - :most)))",
        {"batch": BATCH, "most": tombstones_max},
    ).rowcount
    # Ids only grow, one at a time, so the newest id tells the count without counting.
    events = execute(
        "DELETE FROM events WHERE id IN (SELECT id FROM events WHERE id <="
        " (SELECT max(id) FROM events) - :most ORDER BY id LIMIT :batch)",
        {"batch": BATCH, "most": events_max},
    ).rowcount
    return int(by_age + by_count + events)
