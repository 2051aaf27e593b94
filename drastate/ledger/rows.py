"""Turns records into rows and rows into records. The only place that knows both.

`write_changes` writes the difference between two versions of a record, so that what a write costs
depends on what changed and not on how much the ledger holds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from typing import Any

from sqlalchemy import bindparam, delete, exists, literal_column, update
from sqlalchemy.dialects import sqlite
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.engine import Connection
from sqlalchemy.sql.expression import Executable

from drastate.ledger import tables as t
from drastate.ledger.commit import Execute
from drastate.model import (
    AllocatedDevice,
    ClaimRecord,
    ClaimRef,
    ClaimState,
    ClaimUID,
    DriverName,
    DriverRecord,
    Event,
    Operation,
    PodReference,
    PodUID,
    PreparedDevice,
)


def to_text(instant: datetime) -> str:
    """An aware UTC datetime as the ledger stores it."""
    return instant.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def to_instant(text: str) -> datetime:
    """The reverse of `to_text`."""
    return datetime.fromisoformat(text)


#: Longest free text that is stored. Arbitrary; whoever writes it cuts it before, this is the last
#: net.
FREE_TEXT_MAX = 4096


def _printable(text: str | None) -> str | None:
    """Free text that UTF-8 can hold: a lone surrogate (from a file name, say) is spelled out."""
    return text and text[:FREE_TEXT_MAX].encode("utf-8", "backslashreplace").decode()


# --- statements, compiled once --------------------------------------------------------------------


def _compiled(build: Callable[[], Executable]) -> Callable[[], str]:
    """The SQL text of a Core statement: compiling takes longer than running it."""

    @cache
    def sql() -> str:
        dialect = sqlite.dialect(paramstyle="named")
        return str(build().compile(dialect=dialect))  # type: ignore[attr-defined]

    return sql


def _values(*names: str) -> dict[str, Any]:
    return {name: bindparam(name) for name in names}


@_compiled
def _upsert_claim() -> Executable:
    # A claim that is new to memory may be known to the file: as a tombstone, whose next epoch this
    # is.
    columns = _values("namespace", "name", "status", "created_at", "changed_at")
    statement = insert(t.claims).values(uid=bindparam("uid"), epoch=literal_column("1"), **columns)
    return statement.on_conflict_do_update(
        index_elements=["uid"],
        set_={
            "epoch": t.claims.c.epoch + literal_column("1"),
            **{name: statement.excluded[name] for name in columns},
        },
    )


@_compiled
def _update_status() -> Executable:
    return (
        update(t.claims)
        .where(t.claims.c.uid == bindparam("claim_uid"))
        .values(status=bindparam("new_status"), changed_at=bindparam("now"))
    )


@_compiled
def _delete_drivers() -> Executable:
    return delete(t.claim_drivers).where(t.claim_drivers.c.claim_uid == bindparam("claim_uid"))


@_compiled
def _upsert_driver() -> Executable:
    names = (
        *("state", "since", "called", "unanswered", "attempts", "failing_since", "last_error"),
        *("boot_id", "skip_prepare", "skip_unprepare", "confirmed_at"),
    )
    statement = insert(t.claim_drivers).values(**_values("claim_uid", "driver", *names))
    return statement.on_conflict_do_update(
        index_elements=["claim_uid", "driver"],
        set_={name: statement.excluded[name] for name in names},
    )


@_compiled
def _delete_devices() -> Executable:
    return delete(t.devices).where(
        t.devices.c.claim_uid == bindparam("claim_uid"), t.devices.c.driver == bindparam("driver")
    )


@_compiled
def _insert_device() -> Executable:
    return insert(t.devices).values(
        **_values(
            *("claim_uid", "driver", "ordinal", "pool", "device", "share_id"),
            *("request_names", "cdi_device_ids"),
        )
    )


@_compiled
def _delete_allocations() -> Executable:
    return delete(t.allocations).where(
        t.allocations.c.claim_uid == bindparam("claim_uid"),
        t.allocations.c.driver == bindparam("driver"),
    )


@_compiled
def _insert_allocation() -> Executable:
    return insert(t.allocations).values(
        **_values(
            *("claim_uid", "driver", "ordinal", "pool", "device", "share_id"),
            *("request", "admin_access"),
        )
    )


@_compiled
def _insert_pod() -> Executable:
    return insert(t.pods).values(**_values("uid", "namespace", "name")).on_conflict_do_nothing()


@_compiled
def _upsert_claim_pod() -> Executable:
    statement = insert(t.claim_pods).values(**_values("claim_uid", "pod_uid", "releasing"))
    return statement.on_conflict_do_update(
        index_elements=["claim_uid", "pod_uid"], set_={"releasing": statement.excluded.releasing}
    )


@_compiled
def _delete_claim_pod() -> Executable:
    return delete(t.claim_pods).where(
        t.claim_pods.c.claim_uid == bindparam("claim_uid"),
        t.claim_pods.c.pod_uid == bindparam("pod_uid"),
    )


@_compiled
def _delete_idle_pod() -> Executable:
    return delete(t.pods).where(
        t.pods.c.uid == bindparam("pod_uid"),
        ~exists().where(t.claim_pods.c.pod_uid == bindparam("pod_uid")),
    )


@_compiled
def _insert_event() -> Executable:
    return insert(t.events).values(
        **_values(
            *("at", "kind", "claim_uid", "claim", "pod_uid", "pod", "driver"),
            *("attempt", "duration_ms", "detail"),
        )
    )


# --- records to rows ------------------------------------------------------------------------------


def write_changes(
    execute: Execute, old: ClaimRecord | None, new: ClaimRecord, now: datetime
) -> None:
    """Writes what differs between two versions of a claim's record.

    Args:
        execute: runs a statement in the current transaction.
        old: the version before, None when memory did not know the claim.
        new: the version to write.
        now: stamps the claim row.
    """
    uid = new.ref.uid
    if old is None:
        execute(
            _upsert_claim(),
            {
                "uid": uid,
                "namespace": new.ref.namespace,
                "name": new.ref.name,
                "status": new.status,
                "created_at": to_text(new.created_at),
                "changed_at": to_text(now),
            },
        )
        execute(_delete_drivers(), {"claim_uid": uid})
    elif old.status is not new.status:
        execute(_update_status(), {"claim_uid": uid, "new_status": new.status, "now": to_text(now)})
    old_drivers = old.drivers if old else {}
    for driver, record in new.drivers.items():
        before = old_drivers.get(driver)
        if before is not record:
            _write_driver(execute, uid, driver, before, record)
    _write_pods(execute, uid, old.pods if old else {}, new.pods)


def _write_driver(
    execute: Execute,
    uid: ClaimUID,
    driver: DriverName,
    old: DriverRecord | None,
    new: DriverRecord,
) -> None:
    execute(
        _upsert_driver(),
        {
            "claim_uid": uid,
            "driver": driver,
            "state": new.state,
            "since": to_text(new.since),
            "called": int(new.called),
            "unanswered": int(new.unanswered),
            "attempts": new.attempts,
            "failing_since": to_text(new.failing_since) if new.failing_since else None,
            "last_error": _printable(new.last_error),
            "boot_id": new.boot_id,
            "skip_prepare": int(Operation.PREPARE in new.skip),
            "skip_unprepare": int(Operation.UNPREPARE in new.skip),
            "confirmed_at": to_text(new.confirmed_at) if new.confirmed_at else None,
        },
    )
    key = {"claim_uid": uid, "driver": driver}
    _write_devices(execute, key, old.devices if old else (), new.devices)
    _write_allocations(execute, key, old.allocated if old else (), new.allocated)


def _write_devices(
    execute: Execute,
    key: Mapping[str, str],
    old: Sequence[PreparedDevice],
    new: Sequence[PreparedDevice],
) -> None:
    if new == old:
        return
    if old:
        execute(_delete_devices(), key)
    for ordinal, device in enumerate(new):
        execute(
            _insert_device(),
            {
                **key,
                "ordinal": ordinal,
                "pool": device.pool,
                "device": device.device,
                "share_id": device.share_id,
                "request_names": json.dumps(device.request_names),
                "cdi_device_ids": json.dumps(device.cdi_device_ids),
            },
        )


def _write_allocations(
    execute: Execute,
    key: Mapping[str, str],
    old: Sequence[AllocatedDevice],
    new: Sequence[AllocatedDevice],
) -> None:
    if new == old:
        return
    if old:
        execute(_delete_allocations(), key)
    for ordinal, device in enumerate(new):
        execute(
            _insert_allocation(),
            {
                **key,
                "ordinal": ordinal,
                "pool": device.pool,
                "device": device.device,
                "share_id": device.share_id,
                "request": device.request,
                "admin_access": int(device.admin_access),
            },
        )


def _write_pods(
    execute: Execute,
    uid: ClaimUID,
    old: Mapping[PodUID, PodReference],
    new: Mapping[PodUID, PodReference],
) -> None:
    for pod_uid, pod in new.items():
        before = old.get(pod_uid)
        if before == pod:
            continue
        if before is None:
            execute(_insert_pod(), {"uid": pod_uid, "namespace": pod.namespace, "name": pod.name})
        execute(
            _upsert_claim_pod(),
            {"claim_uid": uid, "pod_uid": pod_uid, "releasing": int(pod.releasing)},
        )
    for pod_uid in old.keys() - new.keys():
        execute(_delete_claim_pod(), {"claim_uid": uid, "pod_uid": pod_uid})
        execute(_delete_idle_pod(), {"pod_uid": pod_uid})


def write_event(execute: Execute, event: Event) -> None:
    """Appends to the history."""
    execute(
        _insert_event(),
        {
            "at": to_text(event.at),
            "kind": event.kind,
            "claim_uid": event.claim.uid if event.claim else None,
            "claim": str(event.claim) if event.claim else None,
            "pod_uid": event.pod.uid if event.pod else None,
            "pod": str(event.pod) if event.pod else None,
            "driver": event.driver,
            "attempt": event.attempt,
            "duration_ms": event.duration_ms,
            "detail": _printable(event.detail),
        },
    )


# --- rows to records ------------------------------------------------------------------------------

# A claim that a pod holds is read whatever its status says.
_IS_UNSETTLED = "(status != 'UNPREPARED' OR uid IN (SELECT claim_uid FROM claim_pods))"
_UNSETTLED = f"claim_uid IN (SELECT uid FROM claims WHERE {_IS_UNSETTLED})"

Problems = dict[str, str]


def read_unsettled(connection: Connection) -> tuple[list[ClaimRecord], Problems]:
    """Reads every claim that is held or owed.

    Returns:
        The records in the order they were made, and for each claim UID with a row that cannot be
        read, what is wrong with it. A bad row never hides the others.
    """
    problems: Problems = {}
    devices = _read_devices(connection, problems)
    drivers = _read_drivers(connection, devices, _read_allocations(connection), problems)
    pods = _read_pods(connection)
    records = []
    for uid, namespace, name, created_at in connection.exec_driver_sql(
        f"SELECT uid, namespace, name, created_at FROM claims WHERE {_IS_UNSETTLED}"
        " ORDER BY created_at, uid"
    ):
        with _noting(problems, uid):
            records.append(
                ClaimRecord(
                    ref=ClaimRef(ClaimUID(uid), namespace, name),
                    created_at=to_instant(created_at),
                    drivers=drivers.get(uid, {}),
                    pods=pods.get(uid, {}),
                )
            )
    return records, problems


def _read_devices(
    connection: Connection, problems: Problems
) -> dict[tuple[str, str], list[PreparedDevice]]:
    devices: dict[tuple[str, str], list[PreparedDevice]] = {}
    for uid, driver, pool, device, share_id, requests, cdi_ids in connection.exec_driver_sql(
        "SELECT claim_uid, driver, pool, device, share_id, request_names, cdi_device_ids"
        f" FROM devices WHERE {_UNSETTLED} ORDER BY claim_uid, driver, ordinal"
    ):
        with _noting(problems, uid):
            devices.setdefault((uid, driver), []).append(
                PreparedDevice(
                    pool, device, share_id, tuple(json.loads(requests)), tuple(json.loads(cdi_ids))
                )
            )
    return devices


def _read_allocations(connection: Connection) -> dict[tuple[str, str], list[AllocatedDevice]]:
    allocated: dict[tuple[str, str], list[AllocatedDevice]] = {}
    for uid, driver, pool, device, share_id, request, admin in connection.exec_driver_sql(
        "SELECT claim_uid, driver, pool, device, share_id, request, admin_access"
        f" FROM allocations WHERE {_UNSETTLED} ORDER BY claim_uid, driver, ordinal"
    ):
        allocated.setdefault((uid, driver), []).append(
            AllocatedDevice(DriverName(driver), pool, device, request, share_id, bool(admin))
        )
    return allocated


def _read_drivers(
    connection: Connection,
    devices: Mapping[tuple[str, str], list[PreparedDevice]],
    allocated: Mapping[tuple[str, str], list[AllocatedDevice]],
    problems: Problems,
) -> dict[str, dict[DriverName, DriverRecord]]:
    drivers: dict[str, dict[DriverName, DriverRecord]] = {}
    for row in connection.exec_driver_sql(
        "SELECT claim_uid, driver, state, since, called, unanswered, attempts, failing_since,"
        " last_error, boot_id, skip_prepare, skip_unprepare, confirmed_at"
        f" FROM claim_drivers WHERE {_UNSETTLED} ORDER BY claim_uid, driver"
    ):
        with _noting(problems, row[0]):
            skip = {Operation.PREPARE: row[10], Operation.UNPREPARE: row[11]}
            drivers.setdefault(row[0], {})[DriverName(row[1])] = DriverRecord(
                state=ClaimState(row[2]),
                since=to_instant(row[3]),
                called=bool(row[4]),
                unanswered=bool(row[5]),
                attempts=row[6],
                failing_since=to_instant(row[7]) if row[7] else None,
                last_error=row[8],
                devices=tuple(devices.get((row[0], row[1]), ())),
                boot_id=row[9],
                skip=frozenset(operation for operation, skips in skip.items() if skips),
                confirmed_at=to_instant(row[12]) if row[12] else None,
                allocated=tuple(allocated.get((row[0], row[1]), ())),
            )
    return drivers


def _read_pods(connection: Connection) -> dict[str, dict[PodUID, PodReference]]:
    pods: dict[str, dict[PodUID, PodReference]] = {}
    for uid, pod_uid, namespace, name, releasing in connection.exec_driver_sql(
        "SELECT claim_uid, pod_uid, namespace, name, releasing FROM claim_pods"
        f" JOIN pods ON pods.uid = pod_uid WHERE {_UNSETTLED} ORDER BY claim_uid, pod_uid"
    ):
        pod = PodReference(PodUID(pod_uid), namespace, name, bool(releasing))
        pods.setdefault(uid, {})[pod.uid] = pod
    return pods


@contextmanager
def _noting(problems: Problems, uid: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError) as error:
        problems[uid] = str(error)
