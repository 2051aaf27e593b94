"""How often the disk is waited for: counted by the kernel, not by us."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from scenario import DRIVERS

from drastate.testing.driver import FakeDriver, node_root


def count_syncs(live: int, lifecycles: int) -> int:
    """fsync and fdatasync calls of a whole process."""
    script = Path(__file__).with_name("lifecycle_child.py")
    with node_root() as root, FakeDriver(root / "plugins_registry", DRIVERS[0]) as driver:
        trace = root / "trace"
        subprocess.run(
            [
                "strace",
                "-f",
                "-e",
                "trace=fsync,fdatasync",
                "-o",
                trace,
                sys.executable,
                script,
                root,
                str(live),
                str(lifecycles),
            ],
            check=True,
            timeout=100,
        )
        assert len(driver.prepare_calls) == live + lifecycles
        assert len(driver.unprepare_calls) == lifecycles
        return len(re.findall(r"f(?:data)?sync\(", trace.read_text()))


@pytest.mark.skipif(
    shutil.which("strace") is None and "CI" not in os.environ, reason="needs strace"
)
@pytest.mark.parametrize("live", [0, 300])
def test_three_syncs_per_pod(live: int) -> None:
    """A one-claim pod's life waits for the disk three times, however many are live."""
    pods = 40
    more = count_syncs(live, 10 + pods) - count_syncs(live, 10)
    # The log moves into the database every 16 MB, which takes three more; here at most once.
    assert 3 * pods <= more <= 3 * pods + 3
