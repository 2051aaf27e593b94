"""An agent over a folder of manifests, stepped by hand, with a fake driver on real sockets."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from drastate import ManagerImpl, Settings
from drastate.agent.device_files import DeviceFiles
from drastate.agent.folder import WatchedFolder
from drastate.agent.loop import ManifestAgent
from drastate.clock import SystemClock
from drastate.testing.driver import FakeDriver, node_root

G = "gpu.example.com"
N = "nic.example.com"
UID = "aaaaaaaa-0000-4000-8000-00000000000{}"
CLAIM_UID = "11111111-1111-4111-8111-11111111111{}"

POD = """\
apiVersion: v1
kind: Pod
metadata: {{name: pod-{n}, uid: {uid}}}
spec:
  resourceClaims: [{{name: gpu, resourceClaimName: claim-{n}}}]
  containers: [{{name: main, resources: {{claims: [{{name: gpu}}]}}}}]
"""
CLAIM = """\
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {{name: claim-{n}, uid: {claim_uid}}}
status:
  reservedFor: [{{resource: pods, name: pod-{n}, uid: {uid}}}]
  allocation: {{devices: {{results: [{{driver: {driver}, pool: p, device: d-{n}, request: gpu}}]}}}}
"""


def manifest(n: int, driver: str = G, kinds: str = "pod claim") -> str:
    values = {"n": n, "uid": UID.format(n), "claim_uid": CLAIM_UID.format(n), "driver": driver}
    texts = {"pod": POD.format(**values), "claim": CLAIM.format(**values)}
    return "---\n".join(texts[kind] for kind in kinds.split())


class Node:
    """Folders, drivers and an agent; `settle` lets the agent look and work until nothing is due."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self.root = root
        self.manifests = root / "manifests"
        self.manifests.mkdir()
        self.files = root / "state" / "pods"
        registry = root / "plugins_registry"
        self.g = stack.enter_context(FakeDriver(registry, G))
        self.n = stack.enter_context(FakeDriver(registry, N))
        settings = Settings(registry_poll_s=0.02, call_timeout_s=5)
        folder = WatchedFolder(self.manifests)
        self.manager = stack.enter_context(
            ManagerImpl(
                folder,
                state_dir=root / "state",
                plugins_registry=registry,
                settings=settings,
                permanent_error=lambda error: "unknown field" in error.message,
            )
        )
        self.agent = ManifestAgent(
            self.manager,
            folder,
            DeviceFiles(self.files, SystemClock().boot_id()),
            clock=SystemClock(),
            scan_interval_s=0.01,
        )
        self.manager.on_driver_registered(self.agent.driver_registered)
        #: Drivers whose registration the agent was told of.
        self.registered: list[str] = []
        self.manager.on_driver_registered(self.registered.append)
        self.manager.start(folder.active_pods)

    def put(self, name: str, text: str) -> None:
        partial = self.manifests / f".{name}"
        partial.write_text(text)
        partial.rename(self.manifests / f"{name}.yaml")

    def look(self, times: int = 1) -> None:
        """So many looks at the folder, and the end of all work that is due after each."""
        for _ in range(times):
            self.agent.look()
            self.agent.start_due()
            wait_until(lambda: not self.is_busy(), "the agent's work")

    def is_busy(self) -> bool:
        return any(work.busy for work in self.agent._pods.values())

    def devices(self, n: int) -> list[str] | None:
        """What the runtime is told for a pod's container."""
        path = self.files / f"{UID.format(n)}.json"
        if not path.exists():
            return None
        (container,) = json.loads(path.read_text())["containers"]
        return container["cdi_devices"]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 15
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.01)


@pytest.fixture
def node() -> Iterator[Node]:
    with ExitStack() as stack:
        yield Node(stack.enter_context(node_root()), stack)
