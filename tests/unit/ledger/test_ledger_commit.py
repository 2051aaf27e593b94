"""Group commit: one transaction for many, and one bad ticket among them."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from ledger_samples import C1, C2, C3, GPU, P1, T0, gpu, held, pod, settled

from drastate import faults
from drastate.errors import InternalError, LedgerUnwritableError
from drastate.ledger.claims import ClaimLedger
from drastate.ledger.engine import raw_connection
from drastate.ledger.reader import open_ledger
from drastate.model import ClaimRecord, ClaimState, DriverRecord, Event, EventKind, PreparedDevice

Execute = Callable[[str, Mapping[str, Any]], Any]


class _Gate:
    """Holds the leader inside its transaction until others have queued behind it."""

    def __init__(self, ledger: ClaimLedger) -> None:
        self._commits = ledger._commits
        self._entered = threading.Event()
        self._open = threading.Event()
        self._thread = threading.Thread(target=self._lead)
        self._thread.start()
        assert self._entered.wait(10)

    def _lead(self) -> None:
        def work(_: Execute) -> None:
            self._entered.set()
            assert self._open.wait(10)

        self._commits.run(work, lambda: None, durable=True)

    def wait_for(self, queued: int) -> None:
        for _ in range(1000):
            if len(self._commits._queue) >= queued:
                return
            threading.Event().wait(0.01)
        raise AssertionError("nobody queues")

    def release(self) -> None:
        self._open.set()
        self._thread.join(10)


def _begins(ledger: ClaimLedger) -> list[str]:
    statements: list[str] = []
    raw_connection(ledger._commits._connection).set_trace_callback(statements.append)
    return statements


def test_commits_that_wait_share_one_transaction(ledger_file: Path) -> None:
    """Forty commits that queue behind one share a single transaction, and all are durable."""
    with ClaimLedger(ledger_file) as ledger:
        gate = _Gate(ledger)
        statements = _begins(ledger)
        with ThreadPoolExecutor(40) as pool:
            done = [
                pool.submit(ledger.commit, [held(f"uid-{n:02}", f"c{n:02}", pod(P1, "p1"))])
                for n in range(40)
            ]
            gate.wait_for(40)
            gate.release()
            for each in done:
                each.result(10)
        assert statements.count("BEGIN IMMEDIATE") == 1
        assert len(ledger.all()) == 40
    with open_ledger(ledger_file) as reader:
        assert len(reader.claims()) == 40


def test_many_threads_need_fewer_transactions_than_commits(ledger_file: Path) -> None:
    """Under load the threads find each other without any help; none is lost."""
    threads, rounds = 8, 25
    barrier = threading.Barrier(threads)

    def work(number: int) -> None:
        barrier.wait(10)
        for step in range(rounds):
            ledger.commit([held(f"uid-{number}-{step}", f"c{number}-{step}", pod(P1, "p1"))])

    with ClaimLedger(ledger_file) as ledger:
        statements = _begins(ledger)
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, range(threads)))
        assert len(ledger.all()) == threads * rounds
        assert statements.count("BEGIN IMMEDIATE") < threads * rounds
    with ClaimLedger(ledger_file) as ledger:
        assert len(ledger.all()) == threads * rounds


def test_a_lone_commit_is_one_transaction_without_savepoints(ledger_file: Path) -> None:
    """Who writes alone pays for nobody else."""
    with ClaimLedger(ledger_file) as ledger:
        statements = _begins(ledger)
        ledger.commit([held(C1, "c1", pod(P1, "p1"))])
        assert statements[0] == "BEGIN IMMEDIATE"
        assert statements[-1] == "COMMIT"
        assert not [each for each in statements if "SAVEPOINT" in each]


def _broken(uid: str) -> ClaimRecord:
    """A record that breaks a constraint: a device without a pool."""
    device = PreparedDevice(None, "gpu-0")  # type: ignore[arg-type]
    driver = DriverRecord(ClaimState.PREPARED, T0, called=True, devices=(gpu(), device))
    claim = held(uid, "broken", pod(P1, "p1"))
    return ClaimRecord(claim.ref, T0, {GPU: driver}, claim.pods)


def test_a_bad_ticket_fails_alone(ledger_file: Path) -> None:
    """One of three commits in a round breaks a constraint: it alone fails, and leaves no row."""
    with ClaimLedger(ledger_file) as ledger:
        gate = _Gate(ledger)
        with ThreadPoolExecutor(3) as pool:
            good = pool.submit(ledger.commit, [held(C1, "c1", pod(P1, "p1"))])
            gate.wait_for(1)
            bad = pool.submit(ledger.commit, [held(C3, "c3", pod(P1, "p1")), _broken(C2)])
            gate.wait_for(2)
            late = pool.submit(ledger.commit, [held("uid-late", "late", pod(P1, "p1"))])
            gate.wait_for(3)
            gate.release()
            assert good.result(10) is None
            assert late.result(10) is None
            with pytest.raises(InternalError, match="NOT NULL"):
                bad.result(10)
        assert {record.ref.name for record in ledger.all()} == {"c1", "late"}
    with open_ledger(ledger_file) as reader:
        assert {claim.name for claim in reader.claims()} == {"c1", "late"}


def test_a_bad_commit_alone_changes_neither_file_nor_memory(ledger_file: Path) -> None:
    """A commit that fails half-way shows nothing of itself, and the next one works (I6)."""
    claim = held(C1, "c1", pod(P1, "p1"))
    with ClaimLedger(ledger_file) as ledger:
        ledger.commit([claim])
        with pytest.raises(InternalError):
            ledger.commit([settled(claim), _broken(C2)], [Event(EventKind.UNPREPARED, T0)])
        assert ledger.all() == (claim,)
        assert ledger.holds(claim.pods[next(iter(claim.pods))].uid)
        ledger.commit([], [Event(EventKind.POD_ADDED, T0)])
    with open_ledger(ledger_file) as reader:
        assert [event.kind for event in reader.events()] == ["opened", "pod_added", "closed"]
        assert reader.claim(C1).status == "PREPARED"


def test_a_commit_is_synced_unless_it_may_be_lost(ledger_file: Path) -> None:
    """Only a round in which nobody asks for durability skips the fsync (I1)."""
    with ClaimLedger(ledger_file) as ledger:
        raw = raw_connection(ledger._commits._connection)

        def level() -> int:
            return int(raw.execute("PRAGMA synchronous").fetchone()[0])

        ledger.commit([], [Event(EventKind.REFUSED, T0)], durable=False)
        assert level() == 1
        ledger.commit([], [Event(EventKind.REFUSED, T0)])
        assert level() == 2


def test_memory_shows_a_commit_before_it_returns_and_not_before_it_is_durable(
    ledger_file: Path,
) -> None:
    """A death after the statements and before the commit leaves memory and file as they were."""

    def fail() -> None:
        raise OSError("as if the process had died here")

    with ClaimLedger(ledger_file) as ledger:
        faults.arm("ledger.before_commit", fail)
        try:
            with pytest.raises(OSError, match="died here"):
                ledger.commit([held(C1, "c1", pod(P1, "p1"))])
        finally:
            faults.disarm()
        assert ledger.all() == ()
        with open_ledger(ledger_file) as reader:
            assert reader.claims() == ()
        ledger.commit([held(C2, "c2", pod(P1, "p1"))])
        assert len(ledger.all()) == 1


def test_an_interrupt_in_the_leader_stops_nobody_else(ledger_file: Path) -> None:
    """Control-C in the thread that leads ends its round with an error; the next commit works."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    with ClaimLedger(ledger_file) as ledger:
        faults.arm("ledger.before_commit", interrupt)
        try:
            with pytest.raises(KeyboardInterrupt):
                ledger.commit([held(C1, "c1", pod(P1, "p1"))])
        finally:
            faults.disarm()
        ledger.commit([held(C2, "c2", pod(P1, "p1"))])
        assert [record.ref.uid for record in ledger.all()] == [C2]


def test_an_interrupt_in_a_thread_that_waits_stops_nobody_else(ledger_file: Path) -> None:
    """Control-C in a thread that waits for the leader: the commits of others still end."""
    code = """
        import os, pathlib, signal, sys, threading
        from drastate.ledger.claims import ClaimLedger
        ledger = ClaimLedger(pathlib.Path(sys.argv[1]))
        entered, release, done = (threading.Event() for _ in range(3))

        def lead(execute):
            entered.set()
            release.wait(10)

        def run(work, after):
            ledger._commits.run(work, after, durable=True)

        leader = threading.Thread(target=run, args=(lead, lambda: None))
        leader.start()
        entered.wait(10)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            ledger.commit([])
        except KeyboardInterrupt:
            print("interrupted")
        release.set()
        leader.join()
        threading.Thread(target=run, args=(lambda _: None, done.set), daemon=True).start()
        print(done.wait(3), flush=True)
        os._exit(0)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(ledger_file)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "interrupted\nTrue\n"


def test_after_an_io_error_nothing_is_believed_any_more(ledger_file: Path) -> None:
    """A failed sync may have lost pages: the ledger refuses work until it is opened again."""
    ledger = ClaimLedger(ledger_file)
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
    error.sqlite_errorname = "SQLITE_IOERR_FSYNC"

    def fail(_: Execute) -> None:
        raise error

    with pytest.raises(LedgerUnwritableError, match="I/O error"):
        ledger._commits.run(fail, lambda: None, durable=True)
    with pytest.raises(LedgerUnwritableError, match="I/O error"):
        ledger.commit([held(C1, "c1", pod(P1, "p1"))])
    with pytest.raises(LedgerUnwritableError):
        ledger.close()
    with ClaimLedger(ledger_file) as again:
        again.commit([held(C1, "c1", pod(P1, "p1"))])
