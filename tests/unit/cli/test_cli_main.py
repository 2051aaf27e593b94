"""How the command line starts, fails and ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from click.testing import CliRunner
from ledger_samples import write_sample

from drastate.cli import main as cli_main
from drastate.cli.main import COMMANDS, cli, main
from drastate.errors import InternalError, PrepareError, UsageError

Capture = pytest.CaptureFixture[str]

#: Offline commands, and what each needs besides a ledger.
OFFLINE = (["claims"], ["claim", "c2"], ["pods"], ["events"], ["check"], ["info"])


def _run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "drastate.cli.main", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


def test_help_shows_every_command_in_its_section_and_teaches() -> None:
    """The help has three sections, a line for each command, examples and the exit statuses."""
    shown = CliRunner().invoke(cli, ["--help"])
    assert shown.exit_code == 0
    text = shown.output
    assert text.index("Run:") < text.index("Inspect:") < text.index("Try:")
    for name, command in COMMANDS.items():
        assert f"  {name} " in text
        assert command.help in text
    assert "Examples:" in text
    assert "3  the ledger is damaged" in text
    assert max(map(len, text.splitlines())) <= 110


def test_help_loads_no_command() -> None:
    """The first help is quick: no module of a command, no SQLAlchemy, no grpc."""
    code = (
        "import sys; from drastate.cli.main import main; main(['--help'])\n"
        "print([name for name in sys.modules if name.startswith(('drastate.cli.', 'sqlalchemy',"
        " 'grpc', 'kubernetes', 'yaml', 'alembic')) and name != 'drastate.cli.main'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_help(name: str) -> None:
    """Each command loads, and says what it does and which options it has."""
    shown = CliRunner().invoke(cli, [name, "--help"])
    assert shown.exit_code == 0, shown.output
    assert f"Usage: drastate {name}" in shown.output.replace("cli ", "drastate ")
    assert len(shown.output.splitlines()) > 5


@pytest.mark.parametrize("arguments", OFFLINE)
def test_offline_commands_load_neither_grpc_nor_a_cluster_client(
    arguments: list[str], ledger_file: Path
) -> None:
    """Inspecting loads what reads the ledger, and nothing that talks to anybody."""
    write_sample(ledger_file)
    code = (
        "import sys; from drastate.cli.main import main\n"
        f"status = main({[*arguments, '--ledger', str(ledger_file), '-o', 'json']!r})\n"
        "heavy = ('grpc', 'kubernetes', 'google', 'alembic', 'yaml', 'tenacity',"
        " 'multiprocessing', 'drastate.drivers', 'drastate.kube', 'drastate.manager',"
        " 'drastate.testing', 'drastate.agent')\n"
        "print(status, [name for name in sys.modules if name.startswith(heavy)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"


def test_version_is_the_packages(capsys: Capture) -> None:
    """`--version` says the name and the installed version."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"drastate, version {version('drastate')}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["no-such-command"],
        ["claims", "--no-such-option"],
        ["claims", "-o", "xml"],
        ["claims", "--status", "DONE"],
        ["events", "--since", "yesterday"],
        ["events", "--limit", "-1"],
        ["claim"],
    ],
)
def test_wrong_usage_is_status_2_and_says_how(arguments: list[str], capsys: Capture) -> None:
    """Usage errors are one line on stderr that names the argument and where the help is."""
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert "drastate: error: " in said.err
    assert "--help" in said.err or "--since" in said.err


def _raising(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def invoke(_: object) -> None:
        raise error

    monkeypatch.setattr(cli_main.cli, "invoke", invoke)


def test_an_error_of_ours_is_one_line_and_its_status(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """The text of the error after the program's name, and the exit status of its class."""
    _raising(UsageError("the remedy"), monkeypatch)
    assert main(["claims"]) == 2
    assert capsys.readouterr().err == "drastate: error: the remedy\n"
    several = PrepareError(
        pod="default/p", pod_uid="u", failures=[UsageError("a"), UsageError("b")]
    )
    _raising(several, monkeypatch)
    assert main(["claims"]) == 1
    assert capsys.readouterr().err.endswith("- a\n  - b\n")


def test_a_bug_is_one_line_that_asks_for_a_report(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """No stack by default; the variable that shows it is named, and shows it."""
    monkeypatch.delenv(cli_main.TRACEBACK_VARIABLE, raising=False)
    _raising(ZeroDivisionError("division by zero"), monkeypatch)
    assert main(["claims"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("drastate: internal error: ZeroDivisionError: division by zero")
    assert "please report it; rerun with DRASTATE_TRACEBACK=1" in said
    assert said.count("\n") == 1
    monkeypatch.setenv(cli_main.TRACEBACK_VARIABLE, "1")
    with pytest.raises(ZeroDivisionError):
        main(["claims"])
    _raising(InternalError("ours"), monkeypatch)
    assert main(["claims"]) == 1


def test_control_c_is_status_130(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """An interrupt ends without a stack, with the status that shells know."""
    _raising(KeyboardInterrupt(), monkeypatch)
    assert main(["claims"]) == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("value", ["no.such.point", "ledger.after_commit:many"])
def test_a_bad_crash_point_is_status_2(
    value: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """A test that arms what does not exist is told so, and does not pass by mistake."""
    monkeypatch.setenv("DRASTATE_CRASH_AT", value)
    assert main(["claims"]) == 2
    assert "DRASTATE_CRASH_AT" in capsys.readouterr().err


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_leaves_early_gets_its_lines_and_no_stack(
    unbuffered: str, tmp_path: Path
) -> None:
    """`drastate events | head -1` on a long list ends quietly, buffered or not."""
    from ledger_samples import T0

    from drastate.ledger.claims import ClaimLedger
    from drastate.model import Event, EventKind

    path = tmp_path / "ledger.db"
    with ClaimLedger(path) as ledger:
        ledger.commit([], [Event(EventKind.REFUSED, T0, detail="x" * 100)] * 5000)
    producer = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "drastate.cli.main",
            "events",
            "--limit",
            "0",
            "--ledger",
            str(path),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )
    head = subprocess.run(
        ["head", "-1"], stdin=producer.stdout, capture_output=True, text=True, check=True
    )
    assert producer.stdout is not None
    producer.stdout.close()
    assert producer.stderr is not None
    assert producer.stderr.read() == b""
    producer.stderr.close()
    assert producer.wait() == 128 + signal.SIGPIPE
    assert head.stdout.startswith("TIME ")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_output_that_is_full_is_one_line(unbuffered: str, ledger_file: Path) -> None:
    """A disk that is full where stdout goes is an error, not silence and not a stack."""
    write_sample(ledger_file)
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = subprocess.run(
            [sys.executable, "-m", "drastate.cli.main", "claims", "--ledger", str(ledger_file)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    assert done.returncode == 1
    assert done.stderr == "drastate: error: No space left on device\n"


def test_a_terminal_of_another_encoding_is_no_obstacle(ledger_file: Path) -> None:
    """What Latin-1 lacks is escaped; the command does not fail on a name."""
    from ledger_samples import held, pod

    from drastate.ledger.claims import ClaimLedger

    with ClaimLedger(ledger_file) as ledger:
        ledger.commit([held("uid-1", "c\N{SNOWMAN}", pod("pod-1", "p1"))])
    done = _run("claims", "--ledger", str(ledger_file), PYTHONIOENCODING="latin-1")
    assert done.returncode == 0
    assert "c\\u2603" in done.stdout


def test_the_ledger_can_be_named_by_the_environment(ledger_file: Path) -> None:
    """DRASTATE_LEDGER stands for --ledger; the option wins."""
    write_sample(ledger_file)
    assert "lab" in _run("claims", DRASTATE_LEDGER=str(ledger_file)).stdout
    done = _run("claims", "--ledger", "/nowhere", DRASTATE_LEDGER=str(ledger_file))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("drastate: error: there is no claim ledger at /nowhere")
