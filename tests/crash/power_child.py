"""A pod's whole life, with a mark in a file at each step; run under strace by `test_power_loss.py`.

python power_child.py ROOT
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

from scenario import SCENARIOS, SETTINGS, FolderClaims

from drastate import ManagerImpl, faults


def main(root: Path) -> None:
    marks = os.open(root / "marks", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for point in faults.POINTS:
        faults.arm(point, partial(os.write, marks, f"{point}\n".encode()))
    with ManagerImpl(
        FolderClaims(),
        state_dir=root / "state",
        plugins_registry=root / "plugins_registry",
        settings=SETTINGS,
    ) as manager:
        manager.start()
        for _ in range(2):
            SCENARIOS["life"](manager)
    os.write(marks, b"closed\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
