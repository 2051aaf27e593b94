"""Prepares and unprepares one-claim pods, one after the other; run under strace by `test_syncs.py`.

python lifecycle_child.py ROOT LIVE LIFECYCLES
"""

from __future__ import annotations

import sys
from pathlib import Path

from scenario import DRIVERS

from drastate import ManagerImpl
from drastate.kube.claim import parse_claim
from drastate.model import Claim


class AnyClaim:
    """A claim of any name, at the first driver, reserved for the pod of the same name."""

    def get_claim(self, _: str, name: str) -> Claim:
        result = {"driver": DRIVERS[0], "pool": "p", "device": name, "request": "r"}
        return parse_claim(
            {
                "metadata": {"uid": f"claim-{name}", "name": name, "namespace": "default"},
                "status": {
                    "reservedFor": [{"resource": "pods", "name": name, "uid": f"pod-{name}"}],
                    "allocation": {"devices": {"results": [result]}},
                },
            }
        )


def pod(name: str) -> dict:
    claims = [{"name": "c", "resourceClaimName": name}]
    container = {"name": "main", "resources": {"claims": [{"name": "c"}]}}
    return {
        "metadata": {"uid": f"pod-{name}", "name": name, "namespace": "default"},
        "spec": {"resourceClaims": claims, "containers": [container]},
    }


def main(root: Path, live: int, lifecycles: int) -> None:
    with ManagerImpl(
        AnyClaim(), state_dir=root / "state", plugins_registry=root / "plugins_registry"
    ) as manager:
        manager.start()
        for number in range(live):
            manager.prepare_resources(pod(f"live-{number}"), "main")
        for number in range(lifecycles):
            manager.prepare_resources(pod(f"x-{number}"), "main")
            manager.unprepare_resources(f"pod-x-{number}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
