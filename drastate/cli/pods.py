"""``drastate pods``."""

from __future__ import annotations

from pathlib import Path

import click

from drastate.cli import output
from drastate.cli.options import inspects, namespace_option, opened
from drastate.ledger.views import HeldClaimRow, PodRow


@click.command
@inspects
@namespace_option
def pods(*, ledger: Path, form: str, namespace: str | None) -> None:
    """List the pods that hold claims, and the drivers that an ending pod waits for."""
    with opened(ledger) as reader:
        found = reader.pods(namespace=namespace)
        if form != "table":
            output.write_data(found, form)
        elif found:
            output.write_table(
                ("NAMESPACE", "NAME", "CLAIMS", "STATE", "WAITING FOR", "UID"), map(_line, found)
            )
        else:
            output.note("No pods.")


def _line(pod: PodRow) -> tuple[str, ...]:
    drivers = {driver: None for claim in pod.claims for driver in claim.waiting_for}
    return (
        pod.namespace,
        pod.name,
        output.joined([claim.name for claim in pod.claims]),
        _state(pod.claims),
        output.joined(list(drivers)),
        pod.uid,
    )


def _state(claims: tuple[HeldClaimRow, ...]) -> str:
    if any(claim.releasing for claim in claims):
        return "ending"
    return "ready" if all(claim.status == "PREPARED" for claim in claims) else "starting"
