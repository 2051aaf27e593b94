"""``drastate events``."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import click

from drastate.cli import output
from drastate.cli.options import driver_option, inspects, opened, since_option
from drastate.ledger.filters import EventFilter
from drastate.ledger.views import EventRow
from drastate.model import EventKind

#: Arbitrary; a few screens.
_DEFAULT_LIMIT = 200

#: Longest detail in a table. Arbitrary; JSON and YAML have it whole.
_DETAIL_WIDTH = 160


@click.command
@inspects
@click.option("--claim", help="Only of this claim: UID, its beginning, namespace/name or name.")
@click.option("--pod", help="Only for this pod: UID, its beginning, namespace/name or name.")
@driver_option
@click.option(
    "--kind",
    type=click.Choice([kind.value for kind in EventKind], case_sensitive=False),
    help="Only of this kind.",
)
@since_option
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=_DEFAULT_LIMIT,
    show_default=True,
    help="At most so many, the newest; 0 for all.",
)
def events(
    *,
    ledger: Path,
    form: str,
    claim: str | None,
    pod: str | None,
    driver: str | None,
    kind: str | None,
    since: datetime | None,
    limit: int,
) -> None:
    """Show what happened to claims, newest last."""
    wanted = EventFilter(
        claim=claim,
        pod=pod,
        driver=driver,
        kind=kind,
        since=since,
        # One more than asked for tells whether there are more.
        limit=limit + 1 if limit else None,
    )
    with opened(ledger) as reader:
        found = reader.events(wanted)
        if limit and len(found) > limit:
            found = found[1:]
            output.note(f"The newest {limit}; --limit 0 shows all.")
        if form != "table":
            output.write_data(found, form)
        elif found:
            write_event_table(found)
        else:
            output.note("No events.")


def write_event_table(events: Sequence[EventRow], *, claim_column: bool = True) -> None:
    """Writes events as a table.

    Args:
        events: what to write.
        claim_column: whether to say which claim each is about.
    """
    headers = ("TIME", "KIND", "CLAIM", "DRIVER", "POD", "ATTEMPT", "MS", "DETAIL")
    dropped = () if claim_column else (headers.index("CLAIM"),)
    rows = [headers, *map(_line, events)]
    kept = [tuple(value for place, value in enumerate(row) if place not in dropped) for row in rows]
    output.write_table(kept[0], kept[1:])


def _line(event: EventRow) -> tuple[str, ...]:
    return (
        event.at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z",
        event.kind,
        event.claim or output.NONE,
        event.driver or output.NONE,
        event.pod or output.NONE,
        _number(event.attempt),
        _number(event.duration_ms),
        output.shorten(event.detail or output.NONE, _DETAIL_WIDTH),
    )


def _number(value: int | None) -> str:
    return output.NONE if value is None else str(value)
