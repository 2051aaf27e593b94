"""Options that say on which node a command acts: its state, its drivers. Shared by all that act."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

_C = TypeVar("_C", bound=Callable[..., object])

FOLDER = click.Path(file_okay=False, path_type=Path)

_OPTIONS = (
    click.option(
        "--state-dir",
        type=FOLDER,
        default=Path("/var/lib/drastate"),
        show_default=True,
        help="Folder of the claim ledger (ledger.db); one process at a time writes it.",
    ),
    click.option(
        "--plugins-registry",
        type=FOLDER,
        default=Path("/var/lib/kubelet/plugins_registry"),
        show_default=True,
        help="Folder in which DRA drivers put their registration sockets; it must exist.",
    ),
    click.option(
        "--endpoint-root",
        type=FOLDER,
        default=None,
        help="Folder that every driver's own socket must lie under.  [default: the parent of"
        " --plugins-registry]",
    ),
    click.option(
        "--call-timeout",
        "call_timeout_s",
        type=click.FloatRange(min=0.1),
        default=45.0,
        show_default=True,
        metavar="SECONDS",
        help="Time a driver has for one call, retries included. 45 is the kubelet's.",
    ),
)


def load_quietly() -> None:
    """Before grpc is loaded: its C library keeps its lines off stderr, which carries our log."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def node_options(command: _C) -> _C:
    """Adds the options, in this order, to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
