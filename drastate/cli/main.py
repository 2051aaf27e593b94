"""The ``drastate`` command: finds the subcommand; turns how it ended into a line and a status."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from io import TextIOWrapper
from typing import NamedTuple, TextIO

import click

from drastate import faults
from drastate.errors import DrastateError, UsageError

#: Set it to see the stack of an internal error.
TRACEBACK_VARIABLE = "DRASTATE_TRACEBACK"

#: What shells report for a command that SIGINT or SIGPIPE ended.
_INTERRUPTED = 130
_PIPE_CLOSED = 141


class _Command(NamedTuple):
    section: str
    home: str
    help: str


#: The commands in the order of the help. Their texts stand here: the help loads none of them.
COMMANDS: Mapping[str, _Command] = {
    "agent": _Command("Run", "drastate.cli.agent:agent", "Run the node agent until it is stopped."),
    "prepare": _Command(
        "Run", "drastate.cli.prepare:prepare", "Prepare the claims of a pod, once."
    ),
    "unprepare": _Command(
        "Run", "drastate.cli.prepare:unprepare", "Let go of the claims of a pod, once."
    ),
    "abandon": _Command(
        "Repair",
        "drastate.cli.abandon:abandon",
        "Give up on a driver that will never unprepare a claim.",
    ),
    "claims": _Command("Inspect", "drastate.cli.claims:claims", "List claims."),
    "claim": _Command("Inspect", "drastate.cli.claims:claim", "Show everything about one claim."),
    "pods": _Command(
        "Inspect",
        "drastate.cli.pods:pods",
        "List the pods that hold claims, and what they wait for.",
    ),
    "events": _Command("Inspect", "drastate.cli.events:events", "Show what happened, newest last."),
    "check": _Command(
        "Inspect", "drastate.cli.check:check", "Look for damage and contradictions in a ledger."
    ),
    "info": _Command(
        "Inspect", "drastate.cli.info:info", "Show what a ledger is, and of which node."
    ),
    "demo": _Command(
        "Try", "drastate.cli.demo:demo", "Watch a claim live and end, with no cluster."
    ),
    "example-driver": _Command(
        "Try",
        "drastate.cli.example_driver:example_driver",
        "Run a DRA driver that has no hardware.",
    ),
}


class _LazyGroup(click.Group):
    """A group that imports a command's module when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].home.partition(":")
        command = getattr(import_module(module), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{module}.{attribute} is not a command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        # One width for all sections: the columns line up.
        width = max(map(len, COMMANDS))
        sections: dict[str, list[tuple[str, str]]] = {}
        for name, command in COMMANDS.items():
            sections.setdefault(command.section, []).append((name.ljust(width), command.help))
        for section, entries in sections.items():
            with formatter.section(section):
                formatter.write_dl(entries)


@click.group(
    cls=_LazyGroup,
    name="drastate",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""\b
Examples:
  drastate claims                          what is prepared on this node, and for whom
  drastate claims --ledger copy.db -o json the same from a copied file, for jq
  drastate claim default/gpu               one claim: its devices, its pods, what is owed
  drastate pods                            which pods hold claims, and what they wait for
  drastate events --since 2h               what happened in the last two hours
  drastate check --ledger copy.db          is this ledger sound

\b
The inspecting commands read the ledger of a running agent, of a stopped one, or a copied file (copy
ledger.db and ledger.db-wal together). They change nothing, and need no cluster and no driver.

\b
Exit status:
  0  fine
  1  it failed, or `check` has findings
  2  wrong usage, or a ledger that this version cannot read
  3  the ledger is damaged, or is no ledger
""",
)
@click.version_option(package_name="drastate", prog_name="drastate")
def cli() -> None:
    """Dynamic Resource Allocation on a node: prepare claims, and see what is prepared."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: the words after ``drastate``; those of the process by default.

    Returns:
        The exit status. Errors have been told on stderr, one line each.
    """
    _never_fail_to_encode()
    try:
        status = _run(list(sys.argv[1:] if arguments is None else arguments) or ["--help"])
        _flush()
    except BrokenPipeError:
        _drop_output()
        return _PIPE_CLOSED
    except KeyboardInterrupt:
        return _INTERRUPTED
    except OSError as error:
        # Nobody reads stdout any more or its disk is full: Python must not try again at exit.
        _drop_output()
        return _fail(f"error: {_os_error_text(error)}", 1)
    return status


def _run(arguments: list[str]) -> int:
    try:
        _arm_faults()
        with cli.make_context("drastate", arguments) as context:
            cli.invoke(context)
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.Abort:
        return _INTERRUPTED
    except click.ClickException as error:
        return _fail(f"error: {_one_line(error)}", error.exit_code)
    except DrastateError as error:
        return _fail(f"error: {str(error).rstrip()}", error.exit_code)
    except OSError:
        raise
    except Exception as error:
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        kind = type(error).__name__
        return _fail(
            f"internal error: {kind}: {error}; please report it; rerun with"
            f" {TRACEBACK_VARIABLE}=1 to see where",
            1,
        )
    return 0


def _one_line(error: click.ClickException) -> str:
    """A click error like every other error; click itself would print four lines."""
    text = " ".join(error.format_message().split())
    if isinstance(error, click.UsageError) and error.ctx is not None:
        return f"{text} (see: {error.ctx.command_path} --help)"
    return text


def _arm_faults() -> None:
    try:
        faults.arm_from_environment()
    except (KeyError, ValueError) as error:
        raise UsageError(f"{faults.ENVIRONMENT_VARIABLE}: {error.args[0]}") from error


def _fail(text: str, status: int) -> int:
    click.echo(f"drastate: {text}", err=True)
    return status


def _os_error_text(error: OSError) -> str:
    if error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return error.strerror or str(error)


# --- streams --------------------------------------------------------------------------------------


def _streams() -> list[TextIO]:
    return [stream for stream in (sys.stdout, sys.stderr) if stream is not None]


def _never_fail_to_encode() -> None:
    for stream in _streams():
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _flush() -> None:
    # Here and not at the interpreter's exit, where an error could only be shouted.
    for stream in _streams():
        stream.flush()


def _drop_output() -> None:
    """Points stdout at nothing, so that what is still buffered fails no more."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, sys.stdout.fileno())
    except (OSError, ValueError):
        pass  # no real stdout, nothing to protect
    finally:
        os.close(nothing)


if __name__ == "__main__":
    sys.exit(main())
