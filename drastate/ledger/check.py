"""Looks for damage and contradictions in a ledger. Reads only, and repairs nothing."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError

from drastate.errors import LedgerCorruptError
from drastate.ledger.claim_rows import load_claims
from drastate.ledger.filters import ClaimFilter
from drastate.ledger.query import UNREADABLE, Query, to_instant, to_instant_or_none
from drastate.ledger.reader import LedgerReader
from drastate.ledger.tables import metadata
from drastate.ledger.views import ClaimRow, DriverRow
from drastate.model import ClaimState, EventKind, derive_status

#: Most lines that SQLite's own check may report.
_INTEGRITY_MAX = 100

_RESTORE = "keep the file, and restore a copy made before the damage"
_REPORT = "please report it; a running agent settles what it can by itself"


class Severity(enum.StrEnum):
    """How bad a finding is."""

    DAMAGE = "damage"
    """What is stored cannot be trusted or read."""
    ERROR = "error"
    """What is stored contradicts itself."""
    WARNING = "warning"
    """Harmless, but should not be."""
    INFO = "info"
    """Nothing wrong; worth knowing."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a check found.

    Attributes:
        severity: how bad it is.
        subject: what it is about, such as "claim default/gpu (<uid>)".
        text: what is the matter.
        remedy: what to do about it; "" for nothing.
    """

    severity: Severity
    subject: str
    text: str
    remedy: str = ""


def check(source: LedgerReader | Connection) -> list[Finding]:
    """Everything that is wrong with a ledger, or worth knowing about it.

    Args:
        source: an open ledger.

    Raises:
        LedgerBusyError: the file stayed locked.
        LedgerError: it cannot be read at all.
    """
    if isinstance(source, LedgerReader):
        query = Query(source.query.connection, source.path)
    else:
        query = Query(source, Path(source.engine.url.database or "ledger"))
    findings: list[Finding] = []
    for part in _PARTS:
        # Each on its own: damage in one table hides nothing about the others.
        try:
            with query.transaction():
                findings += part(query)
        except LedgerCorruptError as error:
            findings.append(Finding(Severity.DAMAGE, "file", error.message, _RESTORE))
    findings += [
        Finding(Severity.DAMAGE, problem.subject, f"cannot be read: {problem.text}", _RESTORE)
        for problem in query.problems
    ]
    return list(dict.fromkeys(findings))


# --- the file -------------------------------------------------------------------------------------


def _integrity(query: Query) -> Iterator[Finding]:
    try:
        lines = [row[0] for row in query.rows(f"PRAGMA integrity_check({_INTEGRITY_MAX})")]
    except DBAPIError as error:
        # A value that a constraint cannot even be computed for, such as broken JSON.
        lines = [str(error.orig)]
    for line in lines:
        if line != "ok":
            yield Finding(Severity.DAMAGE, "file", f"SQLite: {line}", _RESTORE)
    for table, _, parent, _ in query.rows("PRAGMA foreign_key_check"):
        text = f"has a row that refers to a row of {parent} that is not there"
        yield Finding(Severity.DAMAGE, f"table {table}", text, _RESTORE)


def _schema(query: Query) -> Iterator[Finding]:
    present = {row[0] for row in query.rows("SELECT name FROM sqlite_master")}
    for table in metadata.sorted_tables:
        for name in (table.name, *sorted(str(index.name) for index in table.indexes)):
            if name not in present:
                yield Finding(Severity.DAMAGE, "file", f"{name} is missing", _RESTORE)


def _ledger_row(query: Query) -> Iterator[Finding]:
    found = query.rows("SELECT created_at, opened_at, last_clean_stop FROM ledger")
    if not found:
        text = "no manager has ever finished opening it"
        yield Finding(Severity.INFO, "ledger", text)
    for text in found[0] if found else ():
        _try(query, "ledger", to_instant_or_none, text)


# --- claims ---------------------------------------------------------------------------------------


def _claims(query: Query) -> Iterator[Finding]:
    for claim in load_claims(query, ClaimFilter()):
        subject = f"claim {claim} ({claim.uid})"
        try:
            states = [ClaimState(driver.state) for driver in claim.drivers]
            status = ClaimState(claim.status)
        except ValueError as error:
            yield Finding(Severity.DAMAGE, subject, f"cannot be read: {error}", _RESTORE)
            continue
        derived = derive_status(states, held=bool(claim.pods))
        if status is ClaimState.UNPREPARED and claim.pods:
            pods = ", ".join(f"{pod.namespace}/{pod.name}" for pod in claim.pods)
            yield Finding(Severity.ERROR, subject, f"is UNPREPARED, but held by {pods}", _REPORT)
        elif status is not derived:
            text = f"says {status}, but its drivers and pods make it {derived}"
            yield Finding(Severity.ERROR, subject, text, _REPORT)
        for driver in claim.drivers:
            yield from _driver(claim, driver, f"{subject} of driver {driver.driver}")


def _driver(claim: ClaimRow, driver: DriverRow, subject: str) -> Iterator[Finding]:
    if driver.state == ClaimState.UNPREPARED and driver.called:
        text = "is UNPREPARED, but an unprepare is still owed"
        yield Finding(Severity.ERROR, subject, text, _REPORT)
    if driver.state == ClaimState.PREPARED and driver.boot_id is None:
        text = "is PREPARED in an unknown boot, and prepared again before its devices are used"
        yield Finding(Severity.INFO, subject, text)
    if driver.is_awaited:
        pods = ", ".join(f"{pod.namespace}/{pod.name}" for pod in claim.pods)
        text = f"waits for the driver since {_stored(driver.since)}, {driver.attempts} attempts"
        text += f", last error: {driver.last_error}" if driver.last_error else ", no error yet"
        text += f"; cannot end before: {pods}" if pods else ""
        remedy = f"see that driver {driver.driver} runs on the node and is registered"
        yield Finding(Severity.INFO, subject, text, remedy)


def _pods(query: Query) -> Iterator[Finding]:
    for uid, namespace, name in query.rows(
        "SELECT uid, namespace, name FROM pods"
        " WHERE NOT EXISTS (SELECT 1 FROM claim_pods WHERE pod_uid = uid) ORDER BY uid"
    ):
        text = "is recorded, but holds no claim"
        yield Finding(Severity.WARNING, f"pod {namespace}/{name} ({uid})", text, _REPORT)


# --- events ---------------------------------------------------------------------------------------


def _events(query: Query) -> Iterator[Finding]:
    kinds = frozenset(EventKind)
    steps_back = 0
    last_id, last_at = 0, ""
    for number, at, kind in query.rows("SELECT id, at, kind FROM events ORDER BY id"):
        _try(query, f"event {number}", to_instant, at)
        if kind not in kinds:
            text = f"is of a kind that this drastate does not know: {kind!r}"
            yield Finding(Severity.WARNING, f"event {number}", text)
        steps_back += str(at) < last_at
        last_id, last_at = number, str(at)
    if steps_back:
        text = f"the clock went back {steps_back} times; ids tell the order"
        yield Finding(Severity.INFO, "events", text)
    for (used,) in query.rows("SELECT seq FROM sqlite_sequence WHERE name = 'events'"):
        if used < last_id:
            text = f"the newest id is {last_id}, but ids count from {used}: some will come twice"
            yield Finding(Severity.ERROR, "events", text, _REPORT)


def _try(query: Query, subject: str, read: Callable[[Any], object], value: object) -> None:
    try:
        read(value)
    except UNREADABLE as error:
        query.note(subject, error)


def _stored(instant: Any) -> str:
    return str(instant.isoformat(timespec="seconds")).replace("+00:00", "Z")


_PARTS: tuple[Callable[[Query], Iterator[Finding]], ...] = (
    _integrity,
    _schema,
    _ledger_row,
    _claims,
    _pods,
    _events,
)
