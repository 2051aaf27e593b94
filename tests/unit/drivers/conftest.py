from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest

from drastate.config import Settings
from drastate.drivers import DriverClient
from drastate.model import ClaimRef, ClaimUID
from drastate.testing.driver import FakeDriver, node_root


@pytest.fixture
def root():
    """A node's root folder with a short path."""
    with node_root() as folder:
        yield folder


@pytest.fixture
def registry(root) -> Path:
    return root / "plugins_registry"


@pytest.fixture
def c1() -> ClaimRef:
    return ClaimRef(ClaimUID("11111111-1111-4111-8111-111111111111"), "default", "c1")


@pytest.fixture
def c2() -> ClaimRef:
    return ClaimRef(ClaimUID("22222222-2222-4222-8222-222222222222"), "default", "c2")


@pytest.fixture
def make_driver(registry):
    """Makes drivers, and stops them in the end."""
    with contextlib.ExitStack() as stack:

        def make(name="gpu.example.com", *, start=True, **fields) -> FakeDriver:
            driver = FakeDriver(registry, name, **fields)
            stack.callback(driver.stop)
            return driver.start() if start else driver

        yield make


@pytest.fixture
def make_client(registry):
    """Makes started clients that look at the folder often, and closes them in the end."""
    with contextlib.ExitStack() as stack:

        def make(*, start=True, endpoint_root=None, **settings) -> DriverClient:
            settings = {"registry_poll_s": 0.03, "call_timeout_s": 10.0, **settings}
            client = DriverClient(
                registry, endpoint_root=endpoint_root, settings=Settings(**settings)
            )
            stack.callback(client.close)
            if start:
                client.start()
            return client

        yield make


@pytest.fixture
def eventually():
    """Waits until something holds; fails after a time that only a fault can reach."""

    def wait(condition, timeout_s=10.0):
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "it never happened"
            time.sleep(0.01)

    return wait
