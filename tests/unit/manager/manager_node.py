"""A node in a temporary folder: two fake drivers on real sockets, claims in memory, a manager."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from drastate import ManagerImpl, PodSnapshot, Settings
from drastate.errors import ClaimNotFoundError
from drastate.kube.claim import parse_claim
from drastate.model import Claim, ClaimRef, PodUID, PreparedDevice
from drastate.testing.driver import FakeDriver, node_root

G = "gpu.example.com"
N = "nic.example.com"
C1 = "11111111-1111-4111-8111-111111111111"
C2 = "22222222-2222-4222-8222-222222222222"
C3 = "33333333-3333-4333-8333-333333333333"
P1 = "aaaaaaaa-0000-4000-8000-000000000001"
P2 = "aaaaaaaa-0000-4000-8000-000000000002"
GPU = "gpu.example.com/gpu=gpu-0"
NIC = "nic.example.com/nic=nic-0"
DEVICES = {
    G: PreparedDevice("node-a", "gpu-0", None, ("gpu",), (GPU,)),
    N: PreparedDevice("node-a", "nic-0", None, ("nic",), (NIC,)),
}
FAST = Settings(
    call_timeout_s=5.0,
    registry_poll_s=0.02,
    reconcile_period_s=0.1,
    confirm_gone_s=0.05,
    snapshot_spacing_s=0.01,
    late_effect_guard_s=0.2,
    retry_initial_s=0.02,
)


def result(driver: str, device: str, request: str, **more: Any) -> dict[str, Any]:
    """One allocation result."""
    return {"driver": driver, "pool": "node-a", "device": device, "request": request, **more}


GPU_RESULT = result(G, "gpu-0", "gpu")
OTHER_GPU_RESULT = result(G, "gpu-9", "gpu")
NIC_RESULT = result(N, "nic-0", "nic")


def make_claim(
    uid: str,
    name: str,
    results: list[dict[str, Any]] | None,
    reserved: tuple[str, ...] = (P1, P2),
    **metadata: Any,
) -> dict[str, Any]:
    """A ResourceClaim; ``results`` None: not allocated."""
    allocation = None if results is None else {"devices": {"results": results}}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"uid": uid, "name": name, "namespace": "default", **metadata},
        "status": {
            "reservedFor": [{"resource": "pods", "name": "p", "uid": pod} for pod in reserved],
            "allocation": allocation,
        },
    }


def make_pod(
    uid: str, *claims: str, containers: dict[str, list[dict[str, str]]] | None = None
) -> dict[str, Any]:
    """A pod that names claims directly; by default container "main" uses all of them whole."""
    uses = containers if containers is not None else {"main": [{"name": c} for c in claims]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"uid": uid, "name": f"pod-{uid[-1]}", "namespace": "default"},
        "spec": {
            "resourceClaims": [{"name": c, "resourceClaimName": c} for c in claims],
            "containers": [
                {"name": name, "image": "x", "resources": {"claims": refs}}
                for name, refs in uses.items()
            ],
        },
    }


@dataclass
class Claims:
    """A claim source that counts, and fails on demand."""

    objects: dict[str, dict[str, Any]] = field(default_factory=dict)
    error: Exception | None = None
    asked: int = 0

    def put(self, claim: dict[str, Any]) -> None:
        self.objects[claim["metadata"]["name"]] = claim

    def get_claim(self, namespace: str, name: str) -> Claim:
        self.asked += 1
        if self.error is not None:
            raise self.error
        if name not in self.objects:
            raise ClaimNotFoundError(f"no ResourceClaim {namespace}/{name}")
        return parse_claim(self.objects[name])


class Node:
    """Everything a test needs of one node; managers can come and go on it."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self.root = root
        self.state = root / "state"
        self.registry = root / "plugins_registry"
        self.claims = Claims()
        self.live: set[str] | None = {P1, P2}
        self._stack = stack
        self.g = self.add_driver(G)
        self.n = self.add_driver(N)
        self.claims.put(make_claim(C1, "c1", [GPU_RESULT]))
        self.claims.put(make_claim(C2, "c2", [NIC_RESULT]))
        self.claims.put(make_claim(C3, "c3", [GPU_RESULT, NIC_RESULT]))

    def add_driver(self, name: str, **options: Any) -> FakeDriver:
        devices = options.pop("devices", lambda _: [DEVICES[name]])
        return self._stack.enter_context(
            FakeDriver(self.registry, name, devices=devices, **options)
        )

    def snapshot(self) -> PodSnapshot:
        live = self.live
        return PodSnapshot({PodUID(uid) for uid in live or ()}, complete=live is not None)

    def manager(self, **options: Any) -> ManagerImpl:
        """A started manager on this node's ledger."""
        options.setdefault("settings", FAST)
        manager = ManagerImpl(
            options.pop("source", self.claims),
            state_dir=self.state,
            plugins_registry=self.registry,
            **options,
        )
        self._stack.callback(manager.close)
        manager.start(self.snapshot)
        return manager

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """What the ledger file says, asked without any code of ours."""
        connection = sqlite3.connect(f"file:{self.state}/ledger.db?mode=ro", uri=True)
        try:
            return connection.execute(sql).fetchall()
        finally:
            connection.close()

    def states(self) -> dict[tuple[str, str], str]:
        """State by (claim name, driver), tombstones included."""
        found = self.rows(
            "SELECT name, driver, state FROM claims JOIN claim_drivers ON uid = claim_uid"
        )
        return {(name, driver): state for name, driver, state in found}

    def pods(self) -> set[str]:
        """Pods that hold a claim."""
        return {row[0] for row in self.rows("SELECT DISTINCT pod_uid FROM claim_pods")}

    def events(self, *kinds: str) -> list[tuple[Any, ...]]:
        """(kind, claim, driver, attempt, detail) of the history, oldest first."""
        found = self.rows("SELECT kind, claim, driver, attempt, detail FROM events ORDER BY id")
        return [row for row in found if not kinds or row[0] in kinds]


@pytest.fixture
def node() -> Iterator[Node]:
    with ExitStack() as stack:
        yield Node(stack.enter_context(node_root()), stack)


@pytest.fixture
def manager(node: Node) -> ManagerImpl:
    return node.manager()


def ref(uid: str, name: str) -> ClaimRef:
    return ClaimRef(uid, "default", name)  # type: ignore[arg-type]
