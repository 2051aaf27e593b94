"""What the README says is true."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from drastate.kube.claim import parse_claim
from drastate.kube.manifests import StaticClaims
from drastate.testing.driver import FakeDriver, node_root

README = Path(__file__).resolve().parents[2] / "README.md"
POD_UID = "aaaaaaaa-0000-4000-8000-000000000001"
POD = {
    "metadata": {"uid": POD_UID, "name": "p", "namespace": "default"},
    "spec": {
        "resourceClaims": [{"name": "gpu", "resourceClaimName": "c1"}],
        "containers": [{"name": "main", "resources": {"claims": [{"name": "gpu"}]}}],
    },
}
CLAIM = {
    "metadata": {"uid": "11111111-1111-4111-8111-111111111111", "name": "c1"},
    "status": {
        "reservedFor": [{"resource": "pods", "name": "p", "uid": POD_UID}],
        "allocation": {
            "devices": {
                "results": [
                    {"driver": "gpu.example.com", "pool": "p", "device": "d", "request": "r"}
                ]
            }
        },
    },
}


def test_the_embedding_example_runs(monkeypatch, capsys) -> None:
    """The example prints the devices to inject, and leaves nothing behind."""
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(example.strip().splitlines()) <= 16
    with node_root() as root, FakeDriver(root / "plugins_registry") as driver:
        monkeypatch.chdir(root)
        names = {
            "running": [],
            "claims": StaticClaims([parse_claim(CLAIM)]),
            "registry": root / "plugins_registry",
            "pod": POD,
        }
        exec(compile(example, str(README), "exec"), names)
        assert capsys.readouterr().out == "inject: gpu.example.com/gpu=gpu-0\n"
        assert driver.prepared == {}
        assert sum(driver.unprepare_calls.values()) == 1


def commands() -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "drastate", "--help"], capture_output=True, text=True, check=True
    )
    return re.findall(r"^  ([a-z][a-z-]+)  +\S", done.stdout, re.MULTILINE)


def test_every_command_is_in_the_readme() -> None:
    """A command that the README does not show is a command that nobody finds."""
    found = commands()
    assert {"agent", "claims", "demo", "prepare"} <= set(found)
    text = README.read_text(encoding="utf-8")
    assert [name for name in found if f"drastate {name}" not in text] == []


@pytest.mark.parametrize(
    "name",
    [
        "",
        *["agent", "claim", "claims", "check", "demo", "events", "info", "pods"],
        "prepare",
        "unprepare",
        "example-driver",
    ],
)
def test_every_command_has_help(name: str) -> None:
    """--help tells what a command does, and works without a ledger or a driver."""
    done = subprocess.run(
        [sys.executable, "-m", "drastate", *filter(None, [name]), "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Usage:" in done.stdout
    assert len(done.stdout.splitlines()) > 6


def test_importing_the_package_is_light() -> None:
    """The package, and the names of a manager, load neither grpc nor a cluster client."""
    code = (
        "import sys, drastate; drastate.ManagerImpl; drastate.PodSnapshot;"
        "print([m for m in ('grpc', 'kubernetes', 'alembic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
