"""``drastate demo``: the whole story, with real processes, real sockets and two kills."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

_DRIVER = "gpu.example.com"
_POD_UID = "aaaaaaaa-0000-4000-8000-000000000001"
_CLAIM_UID = "11111111-1111-4111-8111-111111111111"
#: Time the driver takes for a prepare: long enough to kill the agent while it waits.
_PREPARE_S = 1.5
#: How long the agent takes a call of the one before for perhaps still running; more than that.
_GUARD_S = 2.0
#: Longest wait for anything. Arbitrary; everything below takes a second or two.
_PATIENCE_S = 20.0

_MANIFEST = f"""\
apiVersion: v1
kind: Pod
metadata:
  name: training
  namespace: default
  uid: {_POD_UID}
spec:
  resourceClaims:
  - name: accelerator
    resourceClaimName: one-gpu
  containers:
  - name: main
    image: example.com/training
    resources:
      claims:
      - name: accelerator
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata:
  name: one-gpu
  namespace: default
  uid: {_CLAIM_UID}
status:
  reservedFor:
  - resource: pods
    name: training
    uid: {_POD_UID}
  allocation:
    devices:
      results:
      - request: gpu
        driver: {_DRIVER}
        pool: demo-node
        device: gpu-0
"""

_INTRODUCTION = """\
A container that needs a GPU does not get it by itself. Three parties work together:

  the driver   knows the hardware; here one that only pretends to have a GPU
  the agent    asks the driver to PREPARE what a pod needs, tells the container runtime
               which devices to inject, and asks the driver to UNPREPARE at the end
  the ledger   is the agent's memory: a file that says what is owed to whom

The agent can die at any instant. Whatever the driver was asked to set up must still be taken
down, once and not while it is in use. That is what this demo shows, with real processes.
"""


class _StoryEndedError(Exception):
    """Something the story needs did not happen; the text says what."""


class _Story:
    """Prints what happens, and keeps count of what should have happened and did not."""

    def __init__(self) -> None:
        self.failed = 0
        self._step = 0

    def step(self, text: str) -> None:
        self._step += 1
        click.echo(f"\n{self._step}. {text}")

    def check(self, text: str, holds: bool) -> None:  # noqa: FBT001 (reads like an assertion)
        self.failed += not holds
        click.echo(f"   {'ok    ' if holds else 'FAILED'}  {text}")

    def show(self, node: _Node, *arguments: str) -> None:
        """Runs a command that reads the ledger, before the reader's eyes; it must succeed."""
        output, status = node.drastate(*arguments)
        self.show_text(f"drastate {' '.join(arguments)}", output)
        if status:
            self.check(f"drastate {arguments[0]} succeeds", holds=False)

    def show_text(self, title: str, text: str) -> None:
        click.echo(f"\n   $ {title}")
        for line in text.rstrip().splitlines():
            click.echo(f"   {line}")
        click.echo("")


class _Node:
    """The folders and processes of one make-believe node."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.manifests = root / "manifests"
        self.state = root / "state"
        self.registry = root / "plugins_registry"
        self.cdi = root / "cdi"
        self.calls_file = root / "driver-calls.jsonl"
        for folder in (self.manifests, self.registry, self.cdi):
            folder.mkdir()
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        """A drastate command in a process of its own; its output goes to NAME.log."""
        with (self.root / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(  # noqa: S603 (our own command)
                [sys.executable, "-m", "drastate", *arguments], stdout=log, stderr=log
            )
        self._processes.append(process)
        return process

    def start_driver(self) -> subprocess.Popen[bytes]:
        return self.start(
            "driver",
            *("example-driver", "--name", _DRIVER, "--plugins-registry", str(self.registry)),
            *("--cdi-dir", str(self.cdi), "--manifests", str(self.manifests)),
            *("--delay-prepare", str(_PREPARE_S), "--call-log", str(self.calls_file)),
        )

    def start_agent(self) -> subprocess.Popen[bytes]:
        return self.start(
            "agent",
            *("agent", "--manifests", str(self.manifests), "--state-dir", str(self.state)),
            *("--plugins-registry", str(self.registry), "--scan-interval", "0.2"),
            *("--late-effect-guard", str(_GUARD_S)),
        )

    def stop_all(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()

    def drastate(self, *arguments: str) -> tuple[str, int]:
        """What an offline drastate command prints about the node's ledger, and its status."""
        done = subprocess.run(  # noqa: S603 (our own command)
            [sys.executable, "-m", "drastate", *arguments, "--ledger", str(self.state)],
            capture_output=True,
            text=True,
            check=False,
            timeout=_PATIENCE_S,
        )
        return done.stdout + done.stderr, done.returncode

    def claim_status(self) -> str:
        """The claim's state by the ledger, asked as anybody could ask."""
        try:
            found = json.loads(self.drastate("claims", "--all", "-o", "json")[0])
        except ValueError:
            return "unknown"
        return next((row["status"] for row in found if row["uid"] == _CLAIM_UID), "unknown")

    def calls(self, method: str) -> int:
        """How many calls of a method the driver says that it received."""
        if not self.calls_file.exists():
            return 0
        lines = self.calls_file.read_text(encoding="utf-8").splitlines()
        return sum(json.loads(line)["method"] == method for line in lines)

    def device_file(self) -> dict[str, Any] | None:
        """What the agent tells the container runtime about the pod."""
        path = self.state / "pods" / f"{_POD_UID}.json"
        if not path.exists():
            return None
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else None

    def cdi_names(self) -> set[str]:
        """The CDI device IDs that a container runtime would find on the node now."""
        specs = [json.loads(path.read_text(encoding="utf-8")) for path in self.cdi.glob("*.json")]
        return {f"{spec['kind']}={device['name']}" for spec in specs for device in spec["devices"]}


def _wait(what: str, condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise _StoryEndedError(f"waited {_PATIENCE_S:.0f} s for this, in vain: {what}")
        time.sleep(0.02)


def _kill(process: subprocess.Popen[bytes]) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def _make_node(*, keep: bool) -> Iterator[_Node]:
    # A short path: a unix socket's name has 107 bytes at most.
    root = Path(tempfile.mkdtemp(prefix="drastate-demo-", dir="/tmp"))
    node = _Node(root)
    try:
        yield node
    finally:
        node.stop_all()
        if keep:
            click.echo(f"The files are kept in {root}")
        else:
            shutil.rmtree(root, ignore_errors=True)


@click.command()
@click.option("--keep", is_flag=True, help="Keep the folder with ledger, logs and sockets.")
def demo(*, keep: bool) -> None:
    """See the main job done, with real processes, in half a minute.

    Starts an example driver and an agent in a temporary folder, runs a pod through its life, kills
    the agent twice with SIGKILL, and checks after each step what must hold. Exit status 1 if
    anything does not.
    """
    click.echo(_INTRODUCTION.rstrip())
    story = _Story()
    with _make_node(keep=keep) as node:
        try:
            _tell(story, node)
        except _StoryEndedError as error:
            story.check(str(error), holds=False)
            for log in sorted(node.root.glob("*.log")):
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-10:])
                story.show_text(f"tail {log.name}", tail)
    click.echo("")
    if story.failed:
        raise click.ClickException(f"{story.failed} of the steps did not hold")
    click.echo("Everything held: prepared, killed twice, known again, and taken down exactly once.")


def _tell(story: _Story, node: _Node) -> None:
    driver, agent = _begin(story, node)
    _kill_before_result(story, node, agent)
    agent = _come_back(story, node)
    agent = _kill_after_result(story, node, agent)
    _pod_leaves(story, node)
    _end(story, agent, driver)


def _begin(story: _Story, node: _Node) -> tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]:
    story.step("A driver and an agent start; the driver registers on a unix socket.")
    driver = node.start_driver()
    agent = node.start_agent()
    ledger = node.state / "ledger.db"
    _wait("the driver's registration socket", lambda: any(node.registry.iterdir()))
    _wait("the agent's ledger", ledger.exists)
    story.check("driver and agent run", driver.poll() is None and agent.poll() is None)
    story.check("the ledger is readable by its owner alone", ledger.stat().st_mode & 0o077 == 0)

    story.step(
        "A pod that needs a GPU arrives: a YAML file, dropped in the agent's folder.\n"
        f"   The driver takes {_PREPARE_S} s to prepare it."
    )
    partial = node.manifests / "training.partial"
    partial.write_text(_MANIFEST, encoding="utf-8")
    partial.rename(node.manifests / "training.yaml")
    _wait("the driver being asked", lambda: node.calls("NodePrepareResources") == 1)
    story.check("the driver was asked to prepare the claim", holds=True)
    return driver, agent


def _kill_before_result(story: _Story, node: _Node, agent: subprocess.Popen[bytes]) -> None:
    story.step("kill -9: the agent dies while it waits for the driver's answer.")
    _kill(agent)
    story.check("no devices were announced", node.device_file() is None)
    story.show(node, "claims")
    story.check("the ledger knew before the call: PREPARING", node.claim_status() == "PREPARING")
    _wait("the driver finishing on its own", node.cdi_names)
    story.check("the driver finished all the same: something is set up and owed", holds=True)


def _come_back(story: _Story, node: _Node) -> subprocess.Popen[bytes]:
    story.step("A new agent starts. It reads the ledger and asks again, which drivers allow.")
    agent = node.start_agent()
    _wait("the pod's devices", lambda: node.device_file() is not None)
    containers = (node.device_file() or {}).get("containers", [])
    devices = {name for container in containers for name in container["cdi_devices"]}
    for container in containers:
        click.echo(f"   container {container['name']}: {', '.join(container['cdi_devices'])}")
    story.check("the devices can be injected: a CDI spec has each", devices <= node.cdi_names())
    story.check("there is a device for the container", bool(devices))
    story.check("the ledger says PREPARED", node.claim_status() == "PREPARED")
    return agent


def _kill_after_result(
    story: _Story, node: _Node, agent: subprocess.Popen[bytes]
) -> subprocess.Popen[bytes]:
    story.step("kill -9 again, now that the pod runs; and another agent starts.")
    _kill(agent)
    before = node.device_file()
    story.check("the ledger still says PREPARED", node.claim_status() == "PREPARED")
    asked = node.calls("NodePrepareResources")
    agent = node.start_agent()
    _wait("the agent's check", lambda: node.calls("NodePrepareResources") > asked)
    story.check("the pod kept its devices", before is not None and node.device_file() == before)
    story.check("nothing was taken away", node.calls("NodeUnprepareResources") == 0)
    # The pod runs for longer than a call of the dead agent could still take effect.
    time.sleep(_GUARD_S)
    return agent


def _pod_leaves(story: _Story, node: _Node) -> None:
    story.step("The pod ends: its file is removed from the folder.")
    (node.manifests / "training.yaml").unlink()
    _wait("UNPREPARED", lambda: node.claim_status() == "UNPREPARED")
    story.check("the runtime is told no more", node.device_file() is None)
    story.check("the driver has taken everything down", not node.cdi_names())
    time.sleep(1)
    unprepares = node.calls("NodeUnprepareResources")
    story.check("the driver was asked exactly once", unprepares == 1)
    story.show(node, "claims", "--all")
    story.show(node, "events")
    story.show(node, "check")


def _end(story: _Story, agent: subprocess.Popen[bytes], driver: subprocess.Popen[bytes]) -> None:
    story.step("Agent and driver are asked to stop.")
    for name, process in (("agent", agent), ("driver", driver)):
        process.terminate()
        try:
            status = process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            status = None
        story.check(f"the {name} stopped cleanly", status == 0)
