"""A node with real Go DRA drivers and no cluster, for the interop tests."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

DRIVER_NAME = "gpu.example.com"
POOL = "node-7"  # not the driver's default node name: an answer must come from the claim
GODRIVER_SOURCE = Path(__file__).parent / "godriver"

#: The helper pulls in hundreds of packages: a cold build takes minutes on two cores.
BUILD_TIMEOUT_S = 1200
#: For any one step of a driver: a fraction of a second on an idle machine.
DRIVER_TIMEOUT_S = 20


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Let the first test that needs the driver wait for its build; others keep the timeout."""
    for item in items:
        if "go_driver_binary" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(BUILD_TIMEOUT_S + 60))
            break


@pytest.fixture(scope="session")
def go_driver_binary():
    """Path of the freshly built driver.

    Where there is no Go, the tests that need it are skipped, or fail if the environment says so.
    """
    go = shutil.which("go")
    if go is None:
        reason = "no `go` on PATH to build tests/interop/godriver with"
        if os.environ.get("DRASTATE_REQUIRE_INTEROP") == "1":
            pytest.fail(f"{reason}, and DRASTATE_REQUIRE_INTEROP=1 demands it", pytrace=False)
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="godriver") as folder:
        binary = Path(folder) / "godriver"
        build = subprocess.run(
            [go, "build", "-buildvcs=false", "-o", str(binary), "."],
            cwd=GODRIVER_SOURCE,
            env=os.environ | {"GOFLAGS": "-mod=readonly", "GOTOOLCHAIN": "local"},
            capture_output=True,
            text=True,
            timeout=BUILD_TIMEOUT_S,
            check=False,
        )
        if build.returncode != 0:
            pytest.fail(f"building the Go driver failed:\n{build.stderr}", pytrace=False)
        yield binary


class Call(NamedTuple):
    """One claim of one call that a driver received."""

    method: str
    claim_uid: str
    instance: str


class GoDriver:
    """A running driver process."""

    def __init__(self, command: list[str], stderr_path: Path) -> None:
        self._stderr_path = stderr_path
        with stderr_path.open("ab") as stderr:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, text=True
            )
        self._lines: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._process.stdout:
            with self._changed:
                self._lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, line: str, *, times: int = 1) -> None:
        """Return once the driver has printed ``line`` so many times since its start."""
        deadline = time.monotonic() + DRIVER_TIMEOUT_S
        with self._changed:
            while self._lines.count(line) < times:
                left = deadline - time.monotonic()
                if left <= 0 or self._process.poll() is not None:
                    pytest.fail(
                        f"the driver did not print {line!r} {times} time(s); exit status "
                        f"{self._process.poll()}, stdout {self._lines}, "
                        f"stderr:\n{self._stderr_path.read_text()}"
                    )
                self._changed.wait(min(left, 0.5))

    def wait_registered(self, *, times: int = 1) -> None:
        """Return once the manager has confirmed the registration so many times."""
        self.wait_for("registered", times=times)

    def stop(self) -> None:
        """End it cleanly (SIGTERM): it removes its sockets and exits with 0."""
        assert self._end(signal.SIGTERM) == 0

    def kill(self) -> None:
        """End it as a crash would (SIGKILL): its sockets stay behind."""
        assert self._end(signal.SIGKILL) == -signal.SIGKILL

    def end(self) -> None:
        """Make sure that it has ended."""
        self._end(signal.SIGKILL)

    def _end(self, how: signal.Signals) -> int:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(how)
        status = self._process.wait(DRIVER_TIMEOUT_S)
        self._reader.join(DRIVER_TIMEOUT_S)
        self._process.stdout.close()
        return status


class Node:
    """Folders laid out like the kubelet's, claims as manifests, and the drivers started on it."""

    def __init__(self, root: Path, binary: Path) -> None:
        self.root = root
        self.manifests = root / "manifests"
        self.registry = root / "plugins_registry"
        self.plugin_data = root / "plugins" / DRIVER_NAME
        self.cdi = root / "cdi"
        self.state = root / "state"
        self.live_pods: set[str] = set()
        self._call_log = root / "calls"
        self._binary = binary
        self._drivers: list[GoDriver] = []
        for folder in (self.manifests, self.registry, self.plugin_data, self.cdi):
            folder.mkdir(parents=True)

    def add_pod(self, name: str, *claims: str) -> dict:
        """A live pod with one container, "main", that uses all of ``claims``."""
        uid = f"uid-of-pod-{name}"
        self.live_pods.add(uid)
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": "lab", "uid": uid},
            "spec": {
                "resourceClaims": [
                    {"name": f"as-{claim}", "resourceClaimName": claim} for claim in claims
                ],
                "containers": [
                    {
                        "name": "main",
                        "resources": {"claims": [{"name": f"as-{claim}"} for claim in claims]},
                    }
                ],
            },
        }

    def add_claim(
        self,
        name: str,
        *,
        pods: tuple[str, ...],
        devices: tuple[str, ...] = (),
        folders: tuple[Path, ...] = (),
    ) -> str:
        """Write an allocated claim, reserved for ``pods``, and answer its UID.

        Without ``devices`` it gets one of its own, "gpu-of-<name>".

        It goes to the manifests that manager and driver share, unless ``folders`` says otherwise.
        """
        uid = f"uid-of-claim-{name}"
        devices = devices or (f"gpu-of-{name}",)
        claim = {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"name": name, "namespace": "lab", "uid": uid},
            "spec": {"devices": {"requests": [_request(device) for device in devices]}},
            "status": {
                "reservedFor": [
                    {"resource": "pods", "name": pod, "uid": f"uid-of-pod-{pod}"} for pod in pods
                ],
                "allocation": {
                    "devices": {
                        "results": [
                            {
                                "request": f"r-{device}",
                                "driver": DRIVER_NAME,
                                "pool": POOL,
                                "device": device,
                            }
                            for device in devices
                        ]
                    }
                },
            },
        }
        for folder in folders or (self.manifests,):
            folder.mkdir(exist_ok=True)
            # The driver reads the folder whenever it likes: the file appears whole.
            unfinished = folder / f".{name}"
            unfinished.write_text(yaml.safe_dump(claim))
            unfinished.rename(folder / f"{name}.yaml")
        return uid

    def start_driver(
        self, instance: str = "only", *flags: str, pod_uid: str = "", manifests: Path | None = None
    ) -> GoDriver:
        """Start a driver and return once both its sockets accept calls.

        Whether a manager has registered it by then is another matter (`GoDriver.wait_registered`).
        """
        driver = GoDriver(
            [
                str(self._binary),
                f"-driver-name={DRIVER_NAME}",
                f"-registry-dir={self.registry}",
                f"-plugin-data-dir={self.plugin_data}",
                f"-cdi-dir={self.cdi}",
                f"-manifests={manifests or self.manifests}",
                f"-call-log={self._call_log}",
                f"-instance={instance}",
                f"-pod-uid={pod_uid}",
                *flags,
            ],
            self.root / f"stderr-{instance}",
        )
        self._drivers.append(driver)
        driver.wait_for("ready")
        return driver

    def end_drivers(self) -> None:
        """Leave no driver process behind."""
        for driver in self._drivers:
            driver.end()

    def calls(self, method: str = "") -> list[Call]:
        """What all drivers were asked for, in order; only that method where one is given."""
        if not self._call_log.exists():
            return []
        lines = [json.loads(line) for line in self._call_log.read_text().splitlines()]
        calls = [Call(line["method"], line["claim_uid"], line["instance"]) for line in lines]
        return [call for call in calls if method in ("", call.method)]

    def cdi_spec(self, claim_uid: str) -> Path:
        """Where the driver keeps the CDI spec of a prepared claim."""
        return self.cdi / f"{DRIVER_NAME}-{claim_uid}.json"


def _request(device: str) -> dict:
    return {"name": f"r-{device}", "exactly": {"deviceClassName": "gpu"}}


@pytest.fixture
def node(go_driver_binary):
    """A node of its own for each test; every driver started on it is ended with it."""
    # Short: a socket's path has 107 bytes, and pytest's own folders use most of them.
    root = Path(tempfile.mkdtemp(prefix="dra", dir="/tmp"))
    node = Node(root, go_driver_binary)
    yield node
    node.end_drivers()
    shutil.rmtree(root)


@pytest.fixture
def open_manager(node):
    """Open the node's manager; it can be closed and opened again, and is closed at the end."""
    from drastate import ManagerImpl, PodSnapshot
    from drastate.kube.manifests import ManifestFolder

    with contextlib.ExitStack() as opened:

        def open_one():
            manager = ManagerImpl(
                ManifestFolder(node.manifests),
                state_dir=node.state,
                plugins_registry=node.registry,
            )
            opened.callback(manager.close)
            manager.start(lambda: PodSnapshot(set(node.live_pods), complete=True))
            return manager

        yield open_one


@pytest.fixture
def manager(open_manager):
    """The node's manager, started."""
    return open_manager()
