"""What the crash tests do, shared by the process that dies and the one that looks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from drastate import ManagerImpl, Settings
from drastate.kube.claim import parse_claim
from drastate.model import Claim, PodUID

DRIVERS = ("gpu.example.com", "nic.example.com")
POD = PodUID("aaaaaaaa-0000-4000-8000-000000000001")
#: One claim at both drivers, and one at the first: two calls in parallel, one of them a batch.
CLAIMS = {
    "both": ("33333333-3333-4333-8333-333333333333", DRIVERS),
    "one": ("11111111-1111-4111-8111-111111111111", DRIVERS[:1]),
}
SETTINGS = Settings(
    registry_poll_s=0.02,
    reconcile_period_s=0.1,
    confirm_gone_s=0.05,
    snapshot_spacing_s=0.01,
    late_effect_guard_s=0.2,
    call_timeout_s=10.0,
)
POD_OBJECT: dict[str, Any] = {
    "metadata": {"uid": POD, "name": "pod", "namespace": "default"},
    "spec": {
        "resourceClaims": [{"name": name, "resourceClaimName": name} for name in CLAIMS],
        "containers": [
            {"name": "main", "resources": {"claims": [{"name": name} for name in CLAIMS]}}
        ],
    },
}


class FolderClaims:
    """The claims above, always there."""

    def get_claim(self, _: str, name: str) -> Claim:
        uid, drivers = CLAIMS[name]
        results = [
            {"driver": driver, "pool": "p", "device": f"d-{name}", "request": "r"}
            for driver in drivers
        ]
        return parse_claim(
            {
                "metadata": {"uid": uid, "name": name, "namespace": "default"},
                "status": {
                    "reservedFor": [{"resource": "pods", "name": "pod", "uid": POD}],
                    "allocation": {"devices": {"results": results}},
                },
            }
        )


def prepare(manager: ManagerImpl) -> None:
    manager.prepare_resources(POD_OBJECT, "main")


def life(manager: ManagerImpl) -> None:
    manager.prepare_resources(POD_OBJECT, "main")
    manager.unprepare_resources(POD)


SCENARIOS: dict[str, Callable[[ManagerImpl], None]] = {"prepare": prepare, "life": life}
