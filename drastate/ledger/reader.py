# ruff: noqa: S608 (conditions are put together here; values are always bound)
"""The claim ledger as everybody but its writer sees it: read-only, and never in the writer's way.

    with open_ledger(Path("/var/lib/drastate")) as ledger:
        for claim in ledger.claims():
            print(claim, claim.status)

Each method reads in one short transaction, so what it returns belongs together, and nothing is held
while the caller prints.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Self

from drastate.errors import UsageError
from drastate.ledger.claim_rows import load_claims, load_summaries
from drastate.ledger.engine import lock_path
from drastate.ledger.evidence import Evidence, wal_path
from drastate.ledger.filters import (
    UID_PREFIX_MIN,
    ClaimFilter,
    EventFilter,
    event_where,
    reference_where,
)
from drastate.ledger.query import UNREADABLE, Query, to_instant, to_instant_or_none
from drastate.ledger.schema import read_revision
from drastate.ledger.views import (
    ClaimRow,
    ClaimSummary,
    EventRow,
    HeldClaimRow,
    LedgerInfo,
    PodRow,
    Problem,
)

#: Most matches that the text of an ambiguous reference lists.
_MATCHES_MAX = 10

_WAL_MISSING = (
    "the -wal file is missing; this may be older than the live ledger ({} was not closed by its"
    " manager when it was copied)"
)

_ALL_CLAIMS = ClaimFilter()
_ALL_EVENTS = EventFilter()


def open_ledger(path: Path) -> LedgerReader:
    """Opens a ledger for reading: of a live manager, of a stopped one, or a copied file.

    Args:
        path: a state folder, or a database file with or without its -wal beside it. Nothing is
            written there.

    Raises:
        UsageError: there is no such file.
        LedgerCorruptError: not a ledger, or damaged.
        LedgerTooNewError: written by a newer drastate.
        LedgerNeedsUpgradeError: written by an older one.
        LedgerError: it cannot be read.
    """
    return LedgerReader(path)


class LedgerReader:
    """Answers questions about a ledger. A context manager; for one thread.

    Every method raises LedgerCorruptError where the file is damaged, and LedgerError where it
    cannot be read. A row that cannot be read is left out and noted in `problems`.

    Attributes:
        path: the database file.
        live: a manager had it open when the reader opened it.
        warnings: what makes the answers doubtful, such as a missing -wal.
        query: for `check` and for reports, which ask what has no method here.
    """

    def __init__(self, path: Path) -> None:
        """See `open_ledger`."""
        self._evidence = Evidence(path)
        self.path = self._evidence.path
        self.live = self._evidence.live
        self.query = Query(self._evidence.connection, self.path)
        self.warnings: tuple[str, ...] = ()
        try:
            if not self.live and not self._evidence.has_wal and not self._was_closed_cleanly():
                self.warnings = (_WAL_MISSING.format(self.path),)
        except BaseException:
            self.close()
            raise

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What could not be read so far. Empty for a sound ledger."""
        return self.query.problems

    def close(self) -> None:
        """Closes the ledger; removes the private copy. Idempotent."""
        self._evidence.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- what is held and owed ---

    def claims(self, wanted: ClaimFilter = _ALL_CLAIMS) -> tuple[ClaimRow, ...]:
        """The claims that ``wanted`` lets through, tombstones included, by namespace and name."""
        return load_claims(self.query, wanted)

    def claim_summaries(self, wanted: ClaimFilter = _ALL_CLAIMS) -> tuple[ClaimSummary, ...]:
        """As `claims`, for lists: only names of what belongs to them, in a quarter of the time."""
        return load_summaries(self.query, wanted)

    def claim(self, reference: str) -> ClaimRow:
        """The one claim that ``reference`` means (see `find_uid`).

        Raises:
            UsageError: it means none, or several, or its row cannot be read.
        """
        uid = self.find_uid(reference)
        claims = self.claims(ClaimFilter(uid=uid))
        if not claims:
            text = "; ".join(problem.text for problem in self.problems)
            raise UsageError(f"claim {uid} cannot be read: {text}")
        return claims[0]

    def find_uid(self, reference: str) -> str:
        """The UID of the claim that ``reference`` means.

        Args:
            reference: a UID, the beginning of one (4 characters or more), "namespace/name", or a
                name that is unique.

        Raises:
            UsageError: no claim matches, or more than one; the text lists them.
        """
        where, parameters = reference_where(reference)
        with self.query.transaction():
            matches = self.query.rows(
                "SELECT uid, namespace, name, status, created_at FROM claims WHERE"
                f" {where} ORDER BY status = 'UNPREPARED', created_at DESC, uid",
                parameters,
            )
        matches = [row for row in matches if row[0] == reference] or matches
        if not matches:
            raise UsageError(
                f"no claim {reference!r} in ledger {self.path}; give a UID, the beginning of one"
                f" ({UID_PREFIX_MIN} characters or more), namespace/name or name"
            )
        if len(matches) > 1:
            listed = [
                f"{uid} ({namespace}/{name}, {status}, since {created_at})"
                for uid, namespace, name, status, created_at in matches[:_MATCHES_MAX]
            ]
            if len(matches) > _MATCHES_MAX:
                listed.append(f"and {len(matches) - _MATCHES_MAX} more")
            raise UsageError(
                f"{reference!r} means {len(matches)} claims, give the UID of one: "
                + "; ".join(listed)
            )
        return str(matches[0][0])

    def pods(self, *, namespace: str | None = None) -> tuple[PodRow, ...]:
        """The pods that hold claims, by namespace and name; with what they wait for."""
        awaited: dict[str, list[str]] = {}
        held: dict[str, list[HeldClaimRow]] = {}
        with self.query.transaction():
            for uid, driver in self.query.rows(
                "SELECT claim_uid, driver FROM claim_drivers WHERE state = 'UNPREPARING'"
                " AND confirmed_at IS NULL ORDER BY claim_uid, driver"
            ):
                awaited.setdefault(uid, []).append(driver)
            for pod_uid, uid, claim_namespace, name, status, releasing in self.query.rows(
                "SELECT pod_uid, uid, namespace, name, status, releasing FROM claim_pods"
                " JOIN claims ON uid = claim_uid ORDER BY pod_uid, uid"
            ):
                waiting_for = tuple(awaited.get(uid, ())) if releasing else ()
                held.setdefault(pod_uid, []).append(
                    HeldClaimRow(uid, claim_namespace, name, status, bool(releasing), waiting_for)
                )
            found = self.query.rows(
                "SELECT uid, namespace, name FROM pods"
                " WHERE :namespace IS NULL OR namespace = :namespace"
                " ORDER BY namespace, name, uid",
                {"namespace": namespace},
            )
        return tuple(
            PodRow(uid, pod_namespace, name, tuple(held.get(uid, ())))
            for uid, pod_namespace, name in found
        )

    # --- what happened ---

    def events(self, wanted: EventFilter = _ALL_EVENTS) -> tuple[EventRow, ...]:
        """The history, newest last."""
        where, parameters = event_where(wanted)
        with self.query.transaction():
            newest_first = self.query.rows(
                "SELECT id, at, kind, claim_uid, claim, pod_uid, pod, driver, attempt,"
                f" duration_ms, detail FROM events{where}"
                " ORDER BY id DESC LIMIT :limit",
                {**parameters, "limit": -1 if wanted.limit is None else wanted.limit},
            )
        events = []
        for number, at, *rest in reversed(newest_first):
            try:
                events.append(EventRow(number, to_instant(at), *rest))
            except UNREADABLE as error:
                self.query.note(f"event {number}", error)
        return tuple(events)

    # --- the ledger itself ---

    def info(self) -> LedgerInfo:
        """The ledger about itself."""
        query = self.query
        with query.transaction():
            found = query.rows(
                "SELECT uuid, node_name, boot_id, created_at, opened_at, last_clean_stop"
                " FROM ledger"
            )
            counts = query.rows(
                "SELECT status, count(*) FROM claims GROUP BY status ORDER BY status"
            )
            pods = query.rows("SELECT count(*) FROM pods")[0][0]
            events, first_event_at, last_event_at = query.rows(
                "SELECT count(*), min(at), max(at) FROM events"
            )[0]
            revision = read_revision(query.connection, self.path)
        uuid, node_name, boot_id, created_at, opened_at, stopped_at = (
            found[0] if found else (None,) * 6
        )
        wal = wal_path(self.path)
        return LedgerInfo(
            path=self.path,
            uuid=uuid,
            node_name=node_name,
            schema_revision=str(revision),
            created_at=self._own_instant(created_at),
            opened_at=self._own_instant(opened_at),
            last_clean_stop=self._own_instant(stopped_at),
            boot_id=boot_id,
            in_use=self.live,
            pid=self._manager_pid() if self.live else None,
            size_bytes=self.path.stat().st_size,
            wal_size_bytes=wal.stat().st_size if wal.exists() else None,
            claims=dict(map(tuple, counts)),
            pods=pods,
            events=events,
            first_event_at=self._own_instant(first_event_at),
            last_event_at=self._own_instant(last_event_at),
        )

    def _own_instant(self, text: str | None) -> datetime | None:
        try:
            return to_instant_or_none(text)
        except UNREADABLE as error:
            self.query.note("ledger", error)
            return None

    def _manager_pid(self) -> int | None:
        try:
            text = lock_path(self.path).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            return None
        return int(text) if text.isdigit() else None

    def _was_closed_cleanly(self) -> bool:
        with self.query.transaction():
            found = self.query.rows("SELECT opened_at, last_clean_stop FROM ledger")
        return bool(found) and found[0][1] is not None and found[0][1] >= found[0][0]
