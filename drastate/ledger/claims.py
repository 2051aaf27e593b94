"""The claim ledger as its one writer sees it."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from sqlalchemy.engine import Connection, Engine

from drastate.clock import Clock, SystemClock
from drastate.errors import LedgerCorruptError, LedgerError
from drastate.ledger import retention, rows
from drastate.ledger.commit import Execute, GroupCommit
from drastate.ledger.engine import WriterLock, open_writer, sqlite_errors
from drastate.ledger.index import ClaimIndex
from drastate.ledger.schema import bring_up_to_date
from drastate.model import ClaimRecord, ClaimUID, Event, EventKind, PodUID


class ClaimLedger:
    """What is held and owed, durable before anybody sees it.

    Safe for any number of threads. Look-ups take no lock and touch no disk. Two commits that change
    the same claim must not overlap: the caller holds that claim's lock (see `manager`).
    """

    def __init__(
        self,
        path: Path,
        *,
        node_name: str = "",
        busy_timeout_ms: int = 5_000,
        clock: Clock | None = None,
    ) -> None:
        """Opens the ledger for writing; makes it when it is missing, upgrades it when it is older.

        Args:
            path: the database file; its folder must exist.
            node_name: recorded in a new ledger, for people.
            busy_timeout_ms: how long a write waits for a foreign process that locks the file.
            clock: the time; the system's by default.

        Raises:
            LedgerBusyError: another manager has it open.
            LedgerTooNewError: written by a newer drastate.
            LedgerCorruptError: not a claim ledger, or damaged.
            LedgerUnwritableError: permissions, disk full, I/O error.
        """
        self.path = path
        self._clock = clock or SystemClock()
        self._index = ClaimIndex()
        self._closed = False
        self._lock = WriterLock(path)
        engine: Engine | None = None
        try:
            engine, connection = open_writer(path, busy_timeout_ms=busy_timeout_ms)
            bring_up_to_date(connection, path)
            self._load(connection)
            self._engine = engine
            self._commits = GroupCommit(connection, path)
            self._commits.run(
                lambda execute: self._stamp_open(execute, node_name), _nothing, durable=True
            )
            # Brings the stamp into the main file, where a copy made without the log shows that the
            # last stop was not the clean one before.
            self._commits.checkpoint()
        except BaseException:
            if engine is not None:
                engine.dispose()
            self._lock.release()
            raise

    def _load(self, connection: Connection) -> None:
        with sqlite_errors(self.path):
            records, problems = rows.read_unsettled(connection)
            connection.rollback()
        if problems:
            listed = "; ".join(f"claim {uid}: {what}" for uid, what in sorted(problems.items()))
            raise LedgerCorruptError(
                f"claim ledger {self.path} has rows that cannot be read: {listed}; it is kept as it"
                f" is: run `drastate check --ledger {self.path}`",
                path=str(self.path),
            )
        for record in records:
            self._index.publish(record)

    def _stamp_open(self, execute: Execute, node_name: str) -> None:
        now = self._clock.now()
        execute(
            "INSERT INTO ledger (id, uuid, node_name, created_at, opened_at, boot_id)"
            " VALUES (1, :uuid, :node_name, :now, :now, :boot_id) ON CONFLICT (id) DO UPDATE"
            " SET opened_at = excluded.opened_at, boot_id = excluded.boot_id,"
            " node_name = CASE excluded.node_name WHEN '' THEN node_name"
            " ELSE excluded.node_name END",
            {
                "uuid": str(uuid.uuid4()),
                "node_name": node_name,
                "now": rows.to_text(now),
                "boot_id": self._clock.boot_id(),
            },
        )
        rows.write_event(execute, Event(EventKind.OPENED, now))

    # --- look-ups: memory only ---

    def find(self, uid: ClaimUID) -> ClaimRecord | None:
        """The record of a claim; None when nothing is held or owed for it."""
        return self._index.find(uid)

    def named(self, namespace: str, name: str) -> tuple[ClaimRecord, ...]:
        """The records with that name, oldest first."""
        return self._index.named(namespace, name)

    def of_pod(self, pod_uid: PodUID) -> tuple[ClaimRecord, ...]:
        """The records of the claims that a pod holds."""
        return self._index.of_pod(pod_uid)

    def holds(self, pod_uid: PodUID) -> bool:
        """Whether a pod holds any claim."""
        return self._index.holds(pod_uid)

    def pods(self) -> tuple[PodUID, ...]:
        """Every pod that holds a claim."""
        return self._index.pods()

    def all(self) -> tuple[ClaimRecord, ...]:
        """Every record that is held or owed."""
        return self._index.all()

    # --- writes ---

    def commit(
        self, changes: Sequence[ClaimRecord], events: Sequence[Event] = (), *, durable: bool = True
    ) -> None:
        """Replaces records and appends to the history, all or nothing.

        Args:
            changes: new versions of records.
            events: what to add to the history.
            durable: return only after an fsync (see `GroupCommit.run`).

        Raises:
            LedgerError: nothing was written, and memory shows nothing of it.
        """
        if self._closed:
            raise LedgerError(f"claim ledger {self.path} is closed; open it", path=str(self.path))
        now = self._clock.now()

        def work(execute: Execute) -> None:
            for new in changes:
                rows.write_changes(execute, self._index.find(new.ref.uid), new, now)
            for event in events:
                rows.write_event(execute, event)

        def publish() -> None:
            for new in changes:
                self._index.publish(new)

        self._commits.run(work, publish, durable=durable)

    def prune(self, *, tombstone_days: float, tombstones_max: int, events_max: int) -> int:
        """Removes one small batch of history that is over its limits; see `retention`.

        Returns:
            How many rows went; 0 when everything is within its limits.

        Raises:
            LedgerError: nothing was removed.
        """
        removed = 0

        def work(execute: Execute) -> None:
            nonlocal removed
            removed = retention.prune(
                execute,
                now=self._clock.now(),
                tombstone_days=tombstone_days,
                tombstones_max=tombstones_max,
                events_max=events_max,
            )

        self._commits.run(work, _nothing, durable=False)
        return removed

    def close(self) -> None:
        """Notes the clean stop and lets another manager in. Idempotent.

        Raises:
            LedgerError: the stop could not be noted; the ledger is closed all the same.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._commits.run(self._stamp_close, _nothing, durable=True)
        finally:
            self._engine.dispose()
            self._lock.release()

    def _stamp_close(self, execute: Execute) -> None:
        now = self._clock.now()
        execute("UPDATE ledger SET last_clean_stop = :now", {"now": rows.to_text(now)})
        rows.write_event(execute, Event(EventKind.CLOSED, now))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _nothing() -> None:
    pass
