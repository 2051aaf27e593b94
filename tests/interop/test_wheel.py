"""The wheel, in a clean virtual environment, with the oldest dependencies that pyproject.toml allows."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.interop

ROOT = Path(__file__).resolve().parents[2]
#: Building and installing take as long as the package index does.
SLOW_S = 900


def run(*command: object, **options: object) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=SLOW_S,
        check=False,
        **options,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ROOT)
    (built,) = folder.glob("drastate-*.whl")
    return built


def floors() -> list[str]:
    """Each dependency, pinned to the oldest version allowed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert all(re.fullmatch(r"[a-z]+>=[\d.]+", line) for line in project["dependencies"])
    return [line.replace(">=", "==") for line in project["dependencies"]]


@pytest.mark.timeout(SLOW_S)
@pytest.mark.parametrize("versions", ["oldest", "newest"])
def test_the_wheel_does_the_main_job(wheel: Path, tmp_path: Path, versions: str) -> None:
    """C67: on the oldest and the newest dependencies the demo holds, migrations included."""
    if versions == "oldest" and sys.version_info >= (3, 13):
        pytest.skip("the oldest dependencies have no builds for this Python")
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    pins = floors() if versions == "oldest" else []
    run(python, "-m", "pip", "install", "-q", wheel, *pins)
    # Away from the checkout, so that only what the wheel holds can be found.
    told = run(tmp_path / "venv" / "bin" / "drastate", "demo", cwd=tmp_path)
    assert "Everything held" in told
    found = run(
        python,
        "-c",
        "import drastate, os; print(os.listdir(os.path.dirname(drastate.__file__)))",
        cwd=tmp_path,
    )
    assert "py.typed" in found
    assert "_migrations" in found
    assert "protos" not in found
