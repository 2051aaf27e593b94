"""``drastate abandon``: the exit for a claim whose driver is gone for good."""

from __future__ import annotations

import getpass
import os
from pathlib import Path

import click

from drastate.cli import output
from drastate.cli.node import FOLDER
from drastate.errors import LedgerError


@click.command(
    epilog="A running agent has the ledger: stop it before, and start it after. It loses nothing."
)
@click.argument("claim", metavar="CLAIM")
@click.option("--driver", required=True, metavar="NAME", help="The driver that is gone.")
@click.option(
    "--reason", required=True, metavar="TEXT", help="Why; it is kept in the ledger's history."
)
@click.option(
    "--state-dir",
    type=FOLDER,
    default=Path("/var/lib/drastate"),
    show_default=True,
    help="Folder of the claim ledger (ledger.db).",
)
def abandon(claim: str, driver: str, reason: str, state_dir: Path) -> None:
    """Give up on a driver that will never unprepare CLAIM.

    A claim whose driver was asked to prepare it waits for that driver until it confirms the
    unprepare, for ever if it must: a driver that is gone and one that is away look alike. When you
    know that it is gone, this ends the wait, and with it the pod's. What the driver left behind on
    the node is not cleaned up by anybody.

    CLAIM is NAMESPACE/NAME or a UID. Refused while a pod holds the claim (`drastate pods` shows
    which), and when the driver owes nothing. It never happens by itself.

    \b
    Example:
      drastate abandon default/gpu --driver gpu.example.com --reason "driver uninstalled, OPS-123"

    Exit status: 0 done, 1 refused, 2 wrong usage, 3 the ledger is damaged.
    """
    # The manager's rules are loaded here, by the command that acts on them.
    from drastate.clock import SystemClock  # noqa: PLC0415
    from drastate.ledger.claims import ClaimLedger  # noqa: PLC0415
    from drastate.ledger.engine import LEDGER_FILE  # noqa: PLC0415
    from drastate.manager.abandon import abandoned, get_owed  # noqa: PLC0415
    from drastate.model import DriverName  # noqa: PLC0415

    path = state_dir / LEDGER_FILE
    if not path.exists():
        raise LedgerError(
            f"there is no claim ledger in {state_dir}; name the agent's folder with --state-dir",
            path=str(path),
        )
    with ClaimLedger(path) as ledger:
        record = get_owed(ledger, claim)
        after, event = abandoned(
            record, DriverName(driver), reason=reason, by=_who(), clock=SystemClock()
        )
        ledger.commit([after], [event])
    output.write(
        output.plain(f"ResourceClaim {record.ref} ({record.ref.uid}): driver {driver} is given up")
    )
    freed = [pod for uid, pod in record.pods.items() if uid not in after.pods]
    for pod in freed:
        output.write(output.plain(f"pod {pod} ({pod.uid}) waits for it no more"))


def _who() -> str:
    """Who runs the command, by the name a person would know."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        name = f"uid {os.getuid()}"
    sudo = os.environ.get("SUDO_USER")
    return f"{sudo} as {name}" if sudo else name
