"""Group commit: writes that arrive while one is being synced share the next sync.

The first thread to arrive leads: it runs every queued piece of work in one transaction, commits,
and wakes the others. Who arrives meanwhile queues; the first of them leads the next round. There is
no timer, so a lone writer never waits for company.
"""

from __future__ import annotations

import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sqlalchemy.engine import Connection

from drastate import faults
from drastate.errors import LedgerUnwritableError
from drastate.ledger.engine import BEGIN, raw_connection, sqlite_errors

#: Most pieces of work in one transaction. Arbitrary; bounds how long the first one waits.
MAX_BATCH = 256

Execute = Callable[[str, Mapping[str, Any]], Any]


class _Ticket:
    """One piece of work in the queue, and how it ended."""

    __slots__ = ("durable", "error", "finished", "leads", "on_commit", "turn", "work")

    def __init__(
        self, work: Callable[[Execute], None], on_commit: Callable[[], None], *, durable: bool
    ) -> None:
        self.work = work
        self.on_commit = on_commit
        self.durable = durable
        self.finished = False
        self.leads = False
        self.error: BaseException | None = None
        # Set when the ticket is finished, or when its thread is to lead.
        self.turn = threading.Event()


class GroupCommit:
    """Runs work on the ledger's writer connection, one transaction at a time."""

    def __init__(self, connection: Connection, path: Path) -> None:
        """Takes over ``connection``: from here on nobody else uses it.

        Args:
            connection: the writer's.
            path: the database file, for texts.
        """
        self._connection = connection  # kept open: it owns the raw one
        self._path = path
        self._raw = raw_connection(connection)
        self._mutex = threading.Lock()
        self._queue: deque[_Ticket] = deque()
        self._led = False
        self._syncs: bool | None = True
        self._broken: LedgerUnwritableError | None = None
        # From just before COMMIT until memory shows the result.
        self._in_doubt = False

    def run(
        self, work: Callable[[Execute], None], on_commit: Callable[[], None], *, durable: bool
    ) -> None:
        """Runs ``work`` in a transaction and returns when it is committed.

        Args:
            work: executes statements; runs in whichever thread leads.
            on_commit: shows the result to readers; called after the commit, in commit order.
            durable: return only after an fsync. False survives the death of the process but not a
                power loss, for what a reboot makes worthless anyway.

        Raises:
            LedgerError: nothing of ``work`` was written.
        """
        ticket = _Ticket(work, on_commit, durable=durable)
        with self._mutex:
            self._queue.append(ticket)
            ticket.leads = not self._led
            self._led = True
        try:
            if not ticket.leads:
                ticket.turn.wait()
            while ticket.leads and not ticket.finished:
                with self._mutex:
                    batch = [self._queue.popleft() for _ in range(min(len(self._queue), MAX_BATCH))]
                self._round(batch)
        finally:
            # Also when a signal handler raised in here: somebody must lead those who wait.
            self._leave(ticket)
        if ticket.error is not None:
            raise ticket.error

    def _leave(self, ticket: _Ticket) -> None:
        """Takes a ticket out of the queue, and hands the lead on if its thread has it."""
        with self._mutex:
            if not ticket.finished and ticket in self._queue:
                self._queue.remove(ticket)
            if not ticket.leads:
                return
            successor = self._queue[0] if self._queue else None
            self._led = successor is not None
            if successor is not None:
                successor.leads = True
                successor.turn.set()

    def _round(self, batch: list[_Ticket]) -> None:
        """One transaction. Whatever happens, every ticket of the batch is finished afterwards."""
        try:
            with sqlite_errors(self._path):
                self._transaction(batch)
            for ticket in batch:
                if ticket.error is None:
                    ticket.on_commit()
            self._in_doubt = False
        except Exception as error:  # noqa: BLE001 (given to the threads that wait for it)
            for ticket in batch:
                ticket.error = ticket.error or error
            self._note_io_error(error)
        except BaseException:
            # A signal handler raised in here. If the commit may have gone through, memory and file
            # may differ: then nobody writes any more, and the next open reads the file.
            interrupted = LedgerUnwritableError(
                f"claim ledger {self._path}: a commit was interrupted; try again"
                + (" in a new process" if self._in_doubt else ""),
                path=str(self._path),
            )
            self._broken = interrupted if self._in_doubt else self._broken
            for ticket in batch:
                ticket.error = ticket.error or interrupted
            raise
        finally:
            for ticket in batch:
                ticket.finished = True
                ticket.turn.set()

    def _transaction(self, batch: list[_Ticket]) -> None:
        if self._broken is not None:
            raise self._broken
        self._in_doubt = False
        self._set_synchronous(full=any(ticket.durable for ticket in batch))
        # The statements are SQLAlchemy's, their transaction is not: when a signal handler raises in
        # it, SQLAlchemy throws the connection away, and the ledger with it.
        execute = self._raw.execute
        try:
            execute(BEGIN)
            if len(batch) == 1:
                batch[0].work(execute)
            else:
                for ticket in batch:
                    self._apart(ticket, execute)
            faults.hit("ledger.before_commit")
            self._in_doubt = True
            execute("COMMIT")
        except BaseException:
            if self._raw.in_transaction:
                execute("ROLLBACK")
            raise
        faults.hit("ledger.after_commit")

    def _apart(self, ticket: _Ticket, execute: Execute) -> None:
        """Runs one of several pieces of work so that its mistake undoes nothing of the others."""
        execute("SAVEPOINT ticket", {})
        try:
            ticket.work(execute)
        except sqlite3.OperationalError:
            # The disk's or the file's fault: SQLite may have ended the whole transaction.
            raise
        except Exception as error:  # noqa: BLE001 (given to the thread that waits for it)
            execute("ROLLBACK TO ticket", {})
            ticket.error = self._translated(error)
        execute("RELEASE ticket", {})

    def _translated(self, error: Exception) -> BaseException:
        try:
            with sqlite_errors(self._path):
                raise error  # noqa: TRY301 (raised for the translation)
        except Exception as translated:  # noqa: BLE001 (the translation is what is wanted)
            return translated

    def _set_synchronous(self, *, full: bool) -> None:
        if full != self._syncs:
            self._syncs = None  # unknown, should a signal handler raise in between
            self._raw.execute(f"PRAGMA synchronous = {'FULL' if full else 'NORMAL'}")
            self._syncs = full

    def _note_io_error(self, error: BaseException) -> None:
        # After a failed fsync the kernel may have dropped the pages and would report success the
        # next time: nothing written through this connection can be believed any more.
        code = getattr(error.__cause__, "sqlite_errorcode", 0)
        if isinstance(error, LedgerUnwritableError) and code & 0xFF == sqlite3.SQLITE_IOERR:
            self._broken = error

    def checkpoint(self) -> None:
        """Moves the log into the database, as far as no reader is in the way; while nobody writes.

        Raises:
            LedgerError: the file cannot be written.
        """
        with sqlite_errors(self._path):
            self._raw.execute("PRAGMA wal_checkpoint(PASSIVE)")
