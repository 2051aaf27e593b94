# ruff: noqa: S608 (conditions are put together here; values are always bound)
"""Reads claims with everything that belongs to them. One damaged row never hides the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from drastate.ledger.filters import ClaimFilter, claim_where
from drastate.ledger.query import (
    UNREADABLE,
    Query,
    to_instant,
    to_instant_or_none,
    to_strings,
)
from drastate.ledger.views import ClaimRow, ClaimSummary, DeviceRow, DriverRow, HolderRow

_Parameters = Mapping[str, Any]

_BY_NAME = " ORDER BY namespace, name, created_at, uid"

# No name in Kubernetes has a comma in it.
_SUMMARIES = (
    "SELECT uid, namespace, name, status, created_at,"
    " (SELECT group_concat(driver) FROM claim_drivers AS d WHERE d.claim_uid = claims.uid),"
    " (SELECT group_concat(device) FROM devices AS d WHERE d.claim_uid = claims.uid),"
    " (SELECT group_concat(pods.name) FROM claim_pods AS h JOIN pods ON pods.uid = h.pod_uid"
    " WHERE h.claim_uid = claims.uid)"
    " FROM claims"
)


def load_claims(query: Query, wanted: ClaimFilter) -> tuple[ClaimRow, ...]:
    """The claims that ``wanted`` lets through, by namespace and name."""
    where, parameters = claim_where(wanted)
    of_them = f" WHERE claim_uid IN (SELECT uid FROM claims{where})" if where else ""
    with query.transaction():
        devices = _devices(query, of_them, parameters)
        drivers = _drivers(query, of_them, parameters, devices)
        holders = _holders(query, of_them, parameters)
        rows = query.rows(
            "SELECT uid, namespace, name, status, epoch, created_at, changed_at FROM claims"
            + where
            + _BY_NAME,
            parameters,
        )
    claims = []
    for uid, namespace, name, status, epoch, created_at, changed_at in rows:
        try:
            claims.append(
                ClaimRow(
                    uid,
                    namespace,
                    name,
                    status,
                    epoch,
                    to_instant(created_at),
                    to_instant(changed_at),
                    tuple(drivers.get(uid, ())),
                    tuple(holders.get(uid, ())),
                )
            )
        except UNREADABLE as error:
            query.note(f"claim {uid}", error)
    return tuple(claims)


def load_summaries(query: Query, wanted: ClaimFilter) -> tuple[ClaimSummary, ...]:
    """As `load_claims`, for lists: a quarter of the time, as SQLite puts the names together."""
    where, parameters = claim_where(wanted)
    with query.transaction():
        rows = query.rows(_SUMMARIES + where + _BY_NAME, parameters)
    summaries = []
    for uid, namespace, name, status, created_at, drivers, devices, pods in rows:
        try:
            summaries.append(
                ClaimSummary(
                    uid,
                    namespace,
                    name,
                    status,
                    to_instant(created_at),
                    tuple(drivers.split(",")) if drivers else (),
                    tuple(devices.split(",")) if devices else (),
                    tuple(pods.split(",")) if pods else (),
                )
            )
        except UNREADABLE as error:
            query.note(f"claim {uid}", error)
    return tuple(summaries)


def _devices(
    query: Query, where: str, parameters: _Parameters
) -> dict[tuple[str, str], list[DeviceRow]]:
    devices: dict[tuple[str, str], list[DeviceRow]] = {}
    for uid, driver, pool, device, share_id, requests, cdi_ids in query.rows(
        "SELECT claim_uid, driver, pool, device, share_id, request_names, cdi_device_ids"
        f" FROM devices{where} ORDER BY claim_uid, driver, ordinal",
        parameters,
    ):
        try:
            devices.setdefault((uid, driver), []).append(
                DeviceRow(pool, device, share_id, to_strings(requests), to_strings(cdi_ids))
            )
        except UNREADABLE as error:
            query.note(f"claim {uid}", error)
    return devices


def _drivers(
    query: Query,
    where: str,
    parameters: _Parameters,
    devices: Mapping[tuple[str, str], Sequence[DeviceRow]],
) -> dict[str, list[DriverRow]]:
    drivers: dict[str, list[DriverRow]] = {}
    for row in query.rows(
        "SELECT claim_uid, driver, state, since, called, unanswered, attempts, failing_since,"
        " last_error, boot_id, skip_prepare, skip_unprepare, confirmed_at"
        f" FROM claim_drivers{where} ORDER BY claim_uid, driver",
        parameters,
    ):
        try:
            drivers.setdefault(row[0], []).append(
                DriverRow(
                    row[1],
                    row[2],
                    to_instant(row[3]),
                    bool(row[4]),
                    bool(row[5]),
                    row[6],
                    to_instant_or_none(row[7]),
                    row[8],
                    row[9],
                    bool(row[10]),
                    bool(row[11]),
                    to_instant_or_none(row[12]),
                    tuple(devices.get((row[0], row[1]), ())),
                )
            )
        except UNREADABLE as error:
            query.note(f"claim {row[0]}", error)
    return drivers


def _holders(query: Query, where: str, parameters: _Parameters) -> dict[str, list[HolderRow]]:
    holders: dict[str, list[HolderRow]] = {}
    for uid, pod_uid, namespace, name, releasing in query.rows(
        "SELECT claim_uid, pod_uid, namespace, name, releasing FROM claim_pods"
        f" JOIN pods ON pods.uid = pod_uid{where} ORDER BY claim_uid, pod_uid",
        parameters,
    ):
        holders.setdefault(uid, []).append(HolderRow(pod_uid, namespace, name, bool(releasing)))
    return holders
