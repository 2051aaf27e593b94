"""Prints the figures that the project promises: ratios and counts, measured on this machine now.

python tests/bench/figures.py
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from datetime import UTC, datetime
from pathlib import Path

from drastate import ManagerImpl
from drastate.kube.manifests import StaticClaims
from drastate.ledger.claims import ClaimLedger
from drastate.manager import lifecycle
from drastate.model import (
    CallResult,
    ClaimRecord,
    ClaimRef,
    ClaimUID,
    DriverName,
    Event,
    EventKind,
    PodReference,
    PodUID,
    PreparedDevice,
)
from drastate.testing.driver import FakeDriver, node_root

G = DriverName("gpu.example.com")


def fill_ledger(folder: Path, claims: int) -> None:
    """A ledger with so many prepared claims, each of a pod of its own, and their history."""
    now = datetime.now(UTC)
    with ClaimLedger(folder / "ledger.db", node_name="bench") as ledger:
        for start in range(0, claims, 500):
            records = []
            for number in range(start, min(claims, start + 500)):
                ref = ClaimRef(ClaimUID(f"{number:08d}-0000-4000-8000-0000"), "ns", f"c-{number}")
                pod = PodReference(PodUID(f"{number:08d}-pod"), "ns", f"p-{number}")
                intended = lifecycle.prepare_intended(None, frozenset(), now)
                device = PreparedDevice("pool", f"d-{number}", None, ("r",), (f"a.b/c={number}",))
                driver = lifecycle.prepare_ended(
                    None, intended, CallResult(), devices=(device,), boot_id="boot", now=now
                )
                records.append(ClaimRecord(ref, now, {G: driver}, {pod.uid: pod}))
            events = [Event(EventKind.PREPARED, now, record.ref, driver=G) for record in records]
            ledger.commit(records, events)


def seconds(command: list[str]) -> float:
    started = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - started


def claims_command(folder: Path) -> None:
    ratios = []
    for _ in range(7):
        ours = seconds([sys.executable, "-m", "drastate", "claims", "--ledger", str(folder)])
        theirs = seconds([sys.executable, "-c", "import sqlalchemy"])
        ratios.append(ours / theirs)
    print(
        f"drastate claims, 10,000 claims ÷ import sqlalchemy: median {statistics.median(ratios):.2f}"
        f" (min {min(ratios):.2f}, max {max(ratios):.2f}); at most 3"
    )


def look_up(folder: Path) -> None:
    with node_root() as root:
        manager = ManagerImpl(
            StaticClaims([]), state_dir=folder, plugins_registry=root / "plugins_registry"
        )
        with manager:
            ask = manager.pod_might_need_to_unprepare_resources
            assert ask("00000007-pod")
            best = min(timeit.repeat(lambda: ask("00000007-pod"), number=200_000, repeat=5))
            print(
                f"pod_might_need_to_unprepare_resources: {best / 200_000 * 1e6:.2f} µs; at most 1"
            )


CLAIM = """\
apiVersion: v1
kind: Pod
metadata: {{name: p-{n}, uid: "pod-{n}"}}
spec:
  resourceClaims: [{{name: c, resourceClaimName: c-{n}}}]
  containers: [{{name: main, resources: {{claims: [{{name: c}}]}}}}]
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {{name: c-{n}, uid: "claim-{n}"}}
status:
  reservedFor: [{{resource: pods, name: p-{n}, uid: "pod-{n}"}}]
  allocation:
    devices:
      results: [{{driver: {driver}, pool: p, device: d-{n}, request: r}}]
"""


def agent_at_rest(claims: int = 1_000, rest_s: float = 30.0) -> None:
    with node_root() as root:
        names = [str(G), "nic.example.com"]
        manifests = root / "manifests"
        manifests.mkdir()
        for number in range(claims):
            text = CLAIM.format(n=number, driver=names[number % 2])
            (manifests / f"{number}.yaml").write_text(text)
        drivers = [FakeDriver(root / "plugins_registry", name).start() for name in names]
        agent = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "drastate",
                "agent",
                "--manifests",
                manifests,
                "--state-dir",
                root / "state",
                "--plugins-registry",
                root / "plugins_registry",
                "--log-level",
                "ERROR",
            ]
        )
        started = time.monotonic()
        while len(list((root / "state").glob("pods/*.json"))) < claims:
            assert time.monotonic() - started < 120, "the agent did not prepare all pods"
            time.sleep(0.2)
        ready_s = time.monotonic() - started
        time.sleep(5)
        before = cpu_s(agent.pid)
        time.sleep(rest_s)
        used = cpu_s(agent.pid) - before
        rss = int(Path(f"/proc/{agent.pid}/statm").read_text().split()[1]) * os.sysconf(
            "SC_PAGE_SIZE"
        )
        agent.terminate()
        agent.wait(20)
        for driver in drivers:
            driver.stop()
        print(
            f"agent, {claims} claims, 2 drivers: all ready after {ready_s:.1f} s; at rest"
            f" {rss / 2**20:.0f} MB (at most 120), {100 * used / rest_s:.2f} % of a core (at most 1)"
        )


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        fill_ledger(Path(name), 10_000)
        claims_command(Path(name))
        look_up(Path(name))
    agent_at_rest()
