"""``drastate claims`` and ``drastate claim REF``."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import click

from drastate.cli import output
from drastate.cli.events import write_event_table
from drastate.cli.options import (
    driver_option,
    inspects,
    namespace_option,
    opened,
    since_option,
    status_option,
)
from drastate.clock import SystemClock
from drastate.ledger.filters import ClaimFilter, EventFilter
from drastate.ledger.views import ClaimRow, ClaimSummary, DeviceRow, DriverRow, EventRow, HolderRow

#: How many events `drastate claim` shows. Arbitrary; `drastate events --claim` shows them all.
_LAST_EVENTS = 10


@click.command
@inspects
@namespace_option
@driver_option
@click.option("--pod", help="Only held by this pod: UID, namespace/name or name.")
@status_option
@since_option
@click.option("-a", "--all", "tombstones", is_flag=True, help="Also those that were let go.")
def claims(
    *,
    ledger: Path,
    form: str,
    namespace: str | None,
    driver: str | None,
    pod: str | None,
    statuses: tuple[str, ...],
    since: datetime | None,
    tombstones: bool,
) -> None:
    """List claims: what is prepared, by which driver, for which pods.

    UNPREPARED claims are history: --all or --status UNPREPARED shows them too.
    """
    wanted = ClaimFilter(
        namespace=namespace,
        driver=driver,
        pod=pod,
        statuses=statuses,
        since=since,
        tombstones=tombstones,
    )
    with opened(ledger) as reader:
        if form != "table":
            output.write_data(reader.claims(wanted), form)
        elif found := reader.claim_summaries(wanted):
            now = SystemClock().now()
            output.write_table(
                ("NAMESPACE", "NAME", "STATUS", "DRIVERS", "DEVICES", "PODS", "AGE", "UID"),
                [_line(claim, now) for claim in found],
            )
        else:
            output.note("No claims.")


def _line(claim: ClaimSummary, now: datetime) -> tuple[str, ...]:
    return (
        claim.namespace,
        claim.name,
        claim.status,
        output.joined(claim.drivers),
        output.joined(claim.devices),
        output.joined(claim.pods),
        output.age(claim.created_at, now),
        claim.uid,
    )


@click.command
@click.argument("reference", metavar="REF")
@inspects
def claim(*, reference: str, ledger: Path, form: str) -> None:
    """Show everything about one claim.

    REF is a UID, the beginning of one (4 characters or more), namespace/name, or a name that only
    one claim has.
    """
    with opened(ledger) as reader:
        row = reader.claim(reference)
        events = reader.events(EventFilter(claim=row.uid, limit=_LAST_EVENTS))
        owed = owed_texts(row)
        if form != "table":
            data = {**output.to_mapping(row), "owed": owed, "events": events}
            output.write_data(data, form)
        else:
            _write_claim(row, owed, events)


def owed_texts(claim: ClaimRow) -> list[str]:
    """What has to happen before the claim is history, a sentence each."""
    owed = []
    for driver in claim.drivers:
        if driver.state == "UNPREPARING":
            owed.append(_unpreparing_text(driver))
        elif driver.state == "PREPARING":
            owed.append(f"{driver.driver} has not prepared it yet{_failing_text(driver)}")
        elif driver.owes_unprepare and not claim.pods:
            owed.append(f"{driver.driver} is to be told to unprepare it: no pod holds it")
        elif driver.owes_unprepare:
            owed.append(f"{driver.driver} is to be told to unprepare it when its last pod is gone")
    return owed


def _unpreparing_text(driver: DriverRow) -> str:
    if driver.confirmed_at is not None:
        return (
            f"{driver.driver} confirmed its unprepare at {output.moment(driver.confirmed_at)} and"
            f" is asked once more, because a prepare got no answer{_failing_text(driver)}"
        )
    return (
        f"{driver.driver} has not confirmed its unprepare since {output.moment(driver.since)}"
        f"{_failing_text(driver)}"
    )


def _failing_text(driver: DriverRow) -> str:
    if driver.last_error is None:
        return ""
    return (
        f" (attempt {driver.attempts}, failing since {output.moment(driver.failing_since)}:"
        f" {driver.last_error})"
    )


def _write_claim(claim: ClaimRow, owed: Sequence[str], events: Sequence[EventRow]) -> None:
    output.write_fields(
        [
            ("Name", claim.name),
            ("Namespace", claim.namespace),
            ("UID", claim.uid),
            ("Status", claim.status),
            ("Epoch", str(claim.epoch)),
            ("Created", output.moment(claim.created_at)),
            ("Changed", output.moment(claim.changed_at)),
        ]
    )
    output.write("Pods:" if claim.pods else "Pods:       none")
    for pod in claim.pods:
        output.write(f"  {output.plain(_pod_text(pod))}")
    output.write("Drivers:" if claim.drivers else "Drivers:    none")
    for driver in claim.drivers:
        output.write(f"  {output.plain(driver.driver)}")
        output.write_fields(_driver_fields(driver), indent="    ")
        for device in driver.devices:
            output.write(f"    Device {output.plain(device.device)}")
            output.write_fields(_device_fields(device), indent="      ")
    output.write("Owed:" if owed else "Owed:       nothing")
    for text in owed:
        output.write(f"  {output.plain(text)}")
    output.write("Last events:" if events else "Last events: none")
    if events:
        write_event_table(events, claim_column=False)


def _pod_text(pod: HolderRow) -> str:
    releasing = ", is ending" if pod.releasing else ""
    return f"{pod.namespace}/{pod.name} ({pod.uid}{releasing})"


def _driver_fields(driver: DriverRow) -> list[tuple[str, str]]:
    found = [("State", driver.state), ("Since", output.moment(driver.since))]
    if driver.attempts:
        found.append(("Attempts", str(driver.attempts)))
    if driver.failing_since is not None:
        found.append(("Failing since", output.moment(driver.failing_since)))
    if driver.last_error is not None:
        found.append(("Last error", driver.last_error))
    if driver.unanswered:
        found.append(("Unanswered", "a prepare got no answer and may still land"))
    skipped = [
        name
        for name, skips in (
            ("NodePrepareResources", driver.skip_prepare),
            ("NodeUnprepareResources", driver.skip_unprepare),
        )
        if skips
    ]
    if skipped:
        found.append(("Needs no", ", ".join(skipped)))
    if driver.confirmed_at is not None:
        found.append(("Confirmed", output.moment(driver.confirmed_at)))
    found.append(("Boot ID", driver.boot_id or "unknown"))
    return found


def _device_fields(device: DeviceRow) -> list[tuple[str, str]]:
    found = [("Pool", device.pool)]
    if device.share_id is not None:
        found.append(("Share ID", device.share_id))
    found.append(("Requests", ", ".join(device.request_names) or "all"))
    found.append(("CDI devices", ", ".join(device.cdi_device_ids) or "none"))
    return found
