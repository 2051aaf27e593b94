# ruff: noqa: S608 (conditions are put together here; values are always bound)
"""Which claims and which events a reader wants, and the SQL conditions that say so."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from drastate.ledger.rows import to_text

#: Shortest prefix of a UID that is taken for one. Shorter ones are names.
UID_PREFIX_MIN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimFilter:
    """Which claims; every field narrows, None and () do not.

    Attributes:
        uid: exactly this one.
        namespace: in this namespace.
        driver: with this driver.
        pod: held by this pod: UID, UID prefix, "namespace/name" or name.
        statuses: with one of these.
        since: whose status changed at or after this instant.
        tombstones: UNPREPARED ones too.
    """

    uid: str | None = None
    namespace: str | None = None
    driver: str | None = None
    pod: str | None = None
    statuses: tuple[str, ...] = ()
    since: datetime | None = None
    tombstones: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EventFilter:
    """Which events; every field narrows, None does not.

    Attributes:
        claim: UID, UID prefix, "namespace/name" or name; also of claims that are gone.
        pod: UID, UID prefix, "namespace/name" or name.
        driver: of this driver.
        kind: of this kind.
        since: at or after this instant.
        limit: at most so many, the newest; None for all.
    """

    claim: str | None = None
    pod: str | None = None
    driver: str | None = None
    kind: str | None = None
    since: datetime | None = None
    limit: int | None = None


def claim_where(wanted: ClaimFilter) -> tuple[str, dict[str, Any]]:
    """The WHERE clause on ``claims``, "" for all of them."""
    conditions: list[str] = []
    parameters: dict[str, Any] = {}
    if wanted.uid is not None:
        conditions.append("uid = :uid")
        parameters["uid"] = wanted.uid
    if wanted.namespace is not None:
        conditions.append("namespace = :namespace")
        parameters["namespace"] = wanted.namespace
    if wanted.driver is not None:
        conditions.append("uid IN (SELECT claim_uid FROM claim_drivers WHERE driver = :driver)")
        parameters["driver"] = wanted.driver
    if wanted.pod is not None:
        condition, more = reference_where(wanted.pod)
        conditions.append(
            "uid IN (SELECT claim_uid FROM claim_pods WHERE pod_uid IN"
            f" (SELECT uid FROM pods WHERE {condition}))"
        )
        parameters |= more
    if wanted.statuses:
        names = [f"status_{number}" for number in range(len(wanted.statuses))]
        conditions.append(f"status IN ({', '.join(':' + name for name in names)})")
        parameters |= dict(zip(names, wanted.statuses, strict=True))
    elif not wanted.tombstones:
        conditions.append("status != 'UNPREPARED'")
    if wanted.since is not None:
        # Instants are stored so that they sort as text.
        conditions.append("changed_at >= :since")
        parameters["since"] = to_text(wanted.since)
    return (f" WHERE {' AND '.join(conditions)}" if conditions else ""), parameters


def reference_where(reference: str) -> tuple[str, dict[str, Any]]:
    """The condition on a table with uid, namespace and name."""
    namespace, slash, name = reference.partition("/")
    if slash:
        return "namespace = :ref_namespace AND name = :ref_name", {
            "ref_namespace": namespace,
            "ref_name": name,
        }
    condition = "(uid = :ref OR name = :ref)"
    if len(reference) >= UID_PREFIX_MIN:
        condition = "(substr(uid, 1, length(:ref)) = :ref OR name = :ref)"
    return condition, {"ref": reference}


def event_where(wanted: EventFilter) -> tuple[str, dict[str, Any]]:
    """The WHERE clause on ``events``, "" for all of them. History outlives what it speaks of."""
    conditions: list[str] = []
    parameters: dict[str, Any] = {}
    for column, reference in (("claim", wanted.claim), ("pod", wanted.pod)):
        if reference is not None:
            conditions.append(
                f"({column} = :{column} OR {column}_uid = :{column}"
                f" OR substr({column}, instr({column}, '/') + 1) = :{column}"
                f" OR (length(:{column}) >= {UID_PREFIX_MIN}"
                f" AND substr({column}_uid, 1, length(:{column})) = :{column}))"
            )
            parameters[column] = reference
    if wanted.driver is not None:
        conditions.append("driver = :driver")
        parameters["driver"] = wanted.driver
    if wanted.kind is not None:
        conditions.append("kind = :kind")
        parameters["kind"] = wanted.kind
    if wanted.since is not None:
        conditions.append("at >= :since")
        parameters["since"] = to_text(wanted.since)
    return (f" WHERE {' AND '.join(conditions)}" if conditions else ""), parameters
