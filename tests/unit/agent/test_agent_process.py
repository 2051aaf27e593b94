"""The agent as a process: starts, refuses, stops."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_node import UID, manifest, wait_until

from drastate.testing.driver import FakeDriver, node_root


@pytest.fixture
def root() -> Iterator[Path]:
    with node_root() as folder:
        (folder / "manifests").mkdir()
        yield folder


def start(root: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "drastate",
            "agent",
            "--manifests",
            root / "manifests",
            "--state-dir",
            root / "state",
            "--plugins-registry",
            root / "plugins_registry",
            "--scan-interval",
            "0.1",
            *options,
        ],
        stderr=subprocess.PIPE,
        text=True,
    )


def end(agent: subprocess.Popen[str]) -> tuple[int, str]:
    _, told = agent.communicate(timeout=30)
    return agent.returncode, told


def test_sigterm_stops_it_cleanly(root: Path) -> None:
    """Exit status 0, JSON lines throughout, private files, and the ledger notes the clean stop."""
    (root / "manifests" / "one.yaml").write_text(manifest(1))
    with FakeDriver(root / "plugins_registry") as driver:
        agent = start(root, "--log-format", "json")
        path = root / "state" / "pods" / f"{UID.format(1)}.json"
        wait_until(path.exists, "the device file")
        driver.stop()
        time.sleep(1)
        agent.terminate()
        status, told = end(agent)
    assert status == 0
    lines = [json.loads(line) for line in told.splitlines()]
    assert lines[-1]["message"].startswith("the agent has stopped")
    assert path.exists()
    assert (root / "state").stat().st_mode & 0o777 == 0o700
    for file in (root / "state").rglob("*"):
        if file.is_file():
            assert file.stat().st_mode & 0o077 == 0, file
    info = subprocess.run(
        [sys.executable, "-m", "drastate", "info", "--ledger", root / "state", "-o", "json"],
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(info.stdout)
    assert found["last_clean_stop"] >= found["opened_at"]


def test_sigterm_while_a_driver_hangs(root: Path) -> None:
    """A driver that hangs does not keep the agent from stopping."""
    (root / "manifests" / "one.yaml").write_text(manifest(1))
    with FakeDriver(root / "plugins_registry") as driver:
        driver.on_prepare.hang = True
        agent = start(root)
        assert driver.wait_calls()
        began = time.monotonic()
        agent.send_signal(signal.SIGTERM)
        status, _ = end(agent)
        assert status == 0
        assert time.monotonic() - began < 15  # the call's own deadline is 45 s


def test_a_second_agent_is_refused(root: Path) -> None:
    """I7: one line with the pid of the first, exit status 1; the first goes on."""
    first = start(root)
    wait_until((root / "state" / "ledger.db.lock").exists, "the first agent")
    time.sleep(1)
    status, told = end(start(root))
    assert status == 1
    assert str(first.pid) in told
    assert len(told.splitlines()) == 1
    first.terminate()
    assert end(first)[0] == 0


@pytest.mark.parametrize(
    ("spoil", "status", "text"),
    [
        (lambda root: (root / "manifests").rmdir(), 2, "manifests"),
        (lambda root: (root / "plugins_registry").rmdir(), 2, "plugins_registry"),
        (lambda root: (root / "state").write_text("a file"), 2, "state"),
    ],
)
def test_a_folder_that_cannot_be_used(root: Path, spoil, status: int, text: str) -> None:
    """One line that names the folder, and the exit status of its kind."""
    spoil(root)
    got, told = end(start(root))
    assert (got, len(told.splitlines())) == (status, 1)
    assert text in told


@pytest.mark.parametrize(
    ("content", "status", "text"),
    [
        (b"this is not a database, but text long enough to have a page" * 99, 3, "not a database"),
        (None, 2, "newer"),
    ],
)
def test_a_ledger_that_cannot_be_used(root: Path, content, status: int, text: str) -> None:
    """A file that is no ledger, or a newer one, is refused by name and kept as it is."""
    import sqlite3

    state = root / "state"
    state.mkdir()
    path = state / "ledger.db"
    if content is None:
        from drastate.ledger.claims import ClaimLedger

        ClaimLedger(path).close()
        connection = sqlite3.connect(path)
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
        connection.commit()
        connection.close()
        content = path.read_bytes()
    else:
        path.write_bytes(content)
    got, told = end(start(root))
    assert (got, len(told.splitlines())) == (status, 1), told
    assert text in told
    assert path.read_bytes() == content
