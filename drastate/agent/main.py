"""Wires the agent together, runs it until a signal comes, and takes it apart."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from drastate.agent import logs
from drastate.agent.device_files import DeviceFiles
from drastate.agent.folder import WatchedFolder
from drastate.agent.loop import ManifestAgent
from drastate.clock import SystemClock
from drastate.config import Settings
from drastate.manager.impl import ManagerImpl

_log = logging.getLogger(__name__)

#: Folder of the device files, in the state folder.
DEVICE_FILES = "pods"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """What the command line says."""

    manifests: Path
    state_dir: Path
    plugins_registry: Path
    endpoint_root: Path | None
    node_name: str
    scan_interval_s: float
    log_format: Literal["text", "json"]
    log_level: str
    settings: Settings


def run_agent(options: AgentOptions) -> None:
    """Runs the agent until SIGTERM or SIGINT.

    Raises:
        UsageError: a folder cannot be used.
        LedgerError: the ledger cannot be opened; its other user's pid is in the text.
    """
    logs.set_up(options.log_format, options.log_level)
    clock = SystemClock()
    folder = WatchedFolder(options.manifests)
    with ManagerImpl(
        folder,
        state_dir=options.state_dir,
        plugins_registry=options.plugins_registry,
        endpoint_root=options.endpoint_root,
        node_name=options.node_name,
        settings=options.settings,
        clock=clock,
    ) as manager:
        files = DeviceFiles(options.state_dir / DEVICE_FILES, clock.boot_id())
        agent = ManifestAgent(
            manager, folder, files, clock=clock, scan_interval_s=options.scan_interval_s
        )
        manager.on_driver_registered(agent.driver_registered)
        manager.start(folder.active_pods)
        _log.info(
            "the agent is ready",
            extra={
                "pid": os.getpid(),
                "manifests": str(options.manifests),
                "state_dir": str(options.state_dir),
                "plugins_registry": str(options.plugins_registry),
            },
        )
        with _stopped_by_signals(agent.stop):
            agent.run()
        _log.info("the agent stops")
    _log.info("the agent has stopped; what is prepared stays prepared")


@contextmanager
def _stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """SIGTERM and SIGINT call ``stop``; a second signal acts as if nobody listened."""
    signals = (signal.SIGTERM, signal.SIGINT)

    def handle(number: int, _: FrameType | None) -> None:
        stop()
        signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, handle) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
