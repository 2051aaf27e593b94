"""A manager that does one thing and may die in the middle; run by `test_kill.py`.

    python crash_child.py ROOT SCENARIO POINT HIT

Exit status 0 when the scenario ran to its end; SIGKILL when the crash point was reached first.
"""

from __future__ import annotations

import sys
from pathlib import Path

from scenario import POD, SCENARIOS, SETTINGS, FolderClaims

from drastate import ManagerImpl, PodSnapshot, faults


def run(root: Path, scenario: str, point: str, hit: int) -> None:
    """Runs ``scenario`` on the node in ``root`` with a death at the ``hit``-th ``point``."""
    with ManagerImpl(
        FolderClaims(),
        state_dir=root / "state",
        plugins_registry=root / "plugins_registry",
        settings=SETTINGS,
    ) as manager:
        faults.arm_kill(point, hit)
        manager.start(lambda: PodSnapshot({POD}, complete=True))
        SCENARIOS[scenario](manager)
        faults.disarm()


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
