"""The options that inspecting commands share, and how they open the ledger."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from drastate.cli import output
from drastate.clock import SystemClock
from drastate.errors import LedgerCorruptError
from drastate.ledger.reader import LedgerReader, open_ledger
from drastate.model import ClaimState

#: Where an agent keeps its ledger unless it is told otherwise.
DEFAULT_LEDGER = Path("/var/lib/drastate")

LEDGER_VARIABLE = "DRASTATE_LEDGER"

_F = TypeVar("_F", bound=Callable[..., Any])

# Newer versions of click made it generic; the old ones cannot be subscripted.
if TYPE_CHECKING:
    _ParamType = click.ParamType[datetime]
else:
    _ParamType = click.ParamType

_DURATION = re.compile(r"(?:\d+[smhdw])+")
_PARTS = re.compile(r"(\d+)([smhdw])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


class Instant(_ParamType):
    """``15m``, ``1h30m``, ``3d`` (before now), or an ISO 8601 instant, UTC unless it says else."""

    name = "when"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> datetime:
        """See `click.ParamType.convert`."""
        if isinstance(value, datetime):
            return value
        text = str(value).strip()
        try:
            if _DURATION.fullmatch(text):
                parts = {_UNITS[unit]: int(number) for number, unit in _PARTS.findall(text)}
                return SystemClock().now() - timedelta(**parts)
            instant = datetime.fromisoformat(text)
            return instant.astimezone(UTC) if instant.tzinfo else instant.replace(tzinfo=UTC)
        except (ValueError, OverflowError):
            self.fail(
                f"{text!r} is neither a duration such as 15m, 2h or 3d nor an instant such as"
                " 2026-01-31T03:12:00Z",
                param,
                ctx,
            )


ledger_option = click.option(
    "--ledger",
    type=click.Path(path_type=Path),
    envvar=LEDGER_VARIABLE,
    default=DEFAULT_LEDGER,
    show_default=True,
    show_envvar=True,
    help="State folder of an agent, or a ledger file (a copy will do).",
)

output_option = click.option(
    "-o",
    "--output",
    "form",
    type=click.Choice(["table", "json", "yaml"]),
    default="table",
    show_default=True,
    help="How to print the answer.",
)

namespace_option = click.option("-n", "--namespace", help="Only in this namespace.")
driver_option = click.option("--driver", help="Only of this DRA driver.")
since_option = click.option(
    "--since", type=Instant(), help="Only newer: 15m, 2h, 3d, or an instant (ISO 8601, UTC)."
)
status_option = click.option(
    "--status",
    "statuses",
    multiple=True,
    type=click.Choice([state.value for state in ClaimState], case_sensitive=False),
    help="Only with this status; can be given more than once.",
)


def inspects(command: _F) -> _F:
    """Gives a command ``--ledger`` and ``--output``."""
    return ledger_option(output_option(command))


@contextmanager
def _without_collector() -> Iterator[None]:
    # A command reads once, prints and ends: looking for cycles in what it read only costs time.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def opened(path: Path) -> Iterator[LedgerReader]:
    """Opens a ledger for one command; tells on stderr what makes its answer doubtful.

    Raises:
        LedgerCorruptError: after the command has printed, when rows could not be read.
        LedgerError: the ledger cannot be opened or read.
        UsageError: there is none.
    """
    with _without_collector(), open_ledger(path) as reader:
        for warning in reader.warnings:
            output.warn(warning)
        yield reader
        problems = reader.problems
    if problems:
        for problem in problems:
            output.warn(f"{problem.subject} cannot be read: {problem.text}")
        raise LedgerCorruptError(
            f"claim ledger {reader.path} is damaged, {len(problems)} problems; the rest is shown;"
            f" run `drastate check --ledger {path}`",
            path=str(reader.path),
        )
