"""What the manager is handed: the drivers of this node, by name."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from drastate.clock import Clock, SystemClock
from drastate.config import PermanentError, Settings
from drastate.drivers.batch import Batch
from drastate.drivers.channel import Graveyard
from drastate.drivers.notices import Notices
from drastate.drivers.registration import Watcher
from drastate.drivers.registry import Registry, describe_disconnected
from drastate.drivers.turns import Turns
from drastate.errors import DriverError, UsageError
from drastate.model import CallResult, ClaimRef, ClaimUID, DriverName, Operation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from drastate.drivers.plugin import PluginInfo

_log = logging.getLogger(__name__)

#: How long a driver that is known already waits for the first look to end, so that the newest of
#: its plugins is called and not the one that happened to register first. Arbitrary; short, because
#: another driver's plugin that hangs must not hold this one up.
_SIBLINGS_S = 0.5


class DriverClient:
    """Finds the DRA drivers of a node and calls them. Thread-safe.

    Which plugin of a driver is called: the newest that is connected. Plugins are ordered by when
    their registration sockets were first seen, those already there at start by the time the socket
    was made, so that the newer one wins in a rolling update and after a restart of ours alike.
    """

    def __init__(
        self,
        plugins_registry: Path,
        *,
        endpoint_root: Path | None = None,
        settings: Settings | None = None,
        clock: Clock | None = None,
        permanent_error: PermanentError | None = None,
    ) -> None:
        """Does not look for drivers yet.

        Args:
            plugins_registry: the folder in which plugins put their registration sockets.
            endpoint_root: the folder that the plugins' own sockets must lie in, at any depth;
                default: the one that holds the registry folder.
            settings: timeouts and retries; default: `Settings()`.
            clock: default: the real one.
            permanent_error: which errors no retry can mend; default: none of those that are
                repeated at all.

        Raises:
            UsageError: the registry folder is not a folder, or the root is empty or relative.
        """
        # Without "..", because endpoints are compared with it as they are written.
        folder = Path(os.path.abspath(plugins_registry))  # noqa: PTH100 (Path.absolute keeps them)
        if not folder.is_dir():
            message = (
                f"the plugin registry {folder} is not a folder; create it, or name the one that "
                "the drivers on this node use"
            )
            raise UsageError(message)
        root = folder.parent if endpoint_root is None else Path(endpoint_root)
        if not root.is_absolute():
            message = f'the root folder of plugin endpoints must be an absolute path, not "{root}"'
            raise UsageError(message)
        root = Path(os.path.normpath(root))
        self._folder = folder
        self._settings = settings or Settings()
        self._clock = clock or SystemClock()
        self._graveyard = Graveyard()
        self._permanent_error = permanent_error
        self._notices = Notices(self._clock)
        self._turns = Turns(self._settings.driver_concurrency, self._clock)
        self._registry = Registry(self._clock)
        self._watcher = Watcher(
            folder,
            root=root,
            registry=self._registry,
            graveyard=self._graveyard,
            notices=self._notices,
            settings=self._settings,
            clock=self._clock,
        )
        self._lock = threading.Lock()
        self._started_at: float | None = None
        self._closed = threading.Event()
        self._closing = threading.Lock()

    def start(self) -> None:
        """Begins to watch the registry folder, in a thread. Does nothing when it has begun already.

        Raises:
            UsageError: the client is closed.
        """
        with self._lock:
            if self._closed.is_set():
                message = "this driver client is closed; make a new one"
                raise UsageError(message)
            if self._started_at is not None:
                return
            self._started_at = self._clock.monotonic()
        self._watcher.start()

    def close(self) -> None:
        """Stops watching, cancels calls in flight and gives up all connections.

        Takes about a second at most, even when a driver hangs; the connections themselves end
        within another one. A second call waits for the first one to end, and does nothing.
        """
        with self._closing:
            with self._lock:
                if self._closed.is_set():
                    return
                self._closed.set()
            self._turns.close()
            self._registry.close()
            self._watcher.close()
            self._graveyard.close()

    def is_registered(self, driver: DriverName) -> bool:
        """Whether a plugin of ``driver`` is registered, connected or not.

        Right after `start` it waits until the sockets that were there have been tried once, for
        `Settings.first_look_s` at most.
        """
        self._await_first_look(driver)
        return self._registry.has(driver)

    def registered_drivers(self) -> tuple[DriverName, ...]:
        """The drivers that have a plugin registered, by name."""
        return self._registry.list_drivers()

    def plugins(self) -> tuple[PluginInfo, ...]:
        """The registered plugins by driver; of each driver the preferred one comes last."""
        return self._registry.list_plugins()

    def explain(self, driver: DriverName) -> str:
        """How ``driver`` stands and what to do about it, for an error message."""
        infos = [info for info in self._registry.list_plugins() if info.driver == driver]
        for info in reversed(infos):
            if info.connected:
                return f"registered at {info.endpoint}, connected"
        if infos:
            return describe_disconnected(infos[-1])
        if (problem := self._watcher.find_problem(driver)) is not None:
            return f"not registered ({problem}); see the driver's log"
        return (
            f"not registered; start the driver on this node and let it register in {self._folder}"
        )

    def on_registered(self, callback: Callable[[DriverName], None]) -> None:
        """Has ``callback`` called with the name of a driver that has got a plugin to call.

        That is when a plugin has registered and its connection is up, and when a lost connection is
        back. Callbacks run in one thread of their own; news that come while one runs are told once
        per driver.
        """
        self._registry.on_registered(callback)

    def prepare(self, driver: DriverName, claims: Sequence[ClaimRef]) -> dict[ClaimUID, CallResult]:
        """Asks ``driver`` to prepare ``claims``, in one call.

        Blocks for `Settings.call_timeout_s` at most.

        Returns:
            A result for each claim. Nothing that a driver does wrong raises.
        """
        return self._call(Operation.PREPARE, driver, claims)

    def unprepare(
        self, driver: DriverName, claims: Sequence[ClaimRef]
    ) -> dict[ClaimUID, CallResult]:
        """Asks ``driver`` to unprepare ``claims``, in one call; otherwise like `prepare`.

        The plugin that is called need not be the one that prepared them.
        """
        return self._call(Operation.UNPREPARE, driver, claims)

    def _call(
        self, operation: Operation, driver: DriverName, claims: Sequence[ClaimRef]
    ) -> dict[ClaimUID, CallResult]:
        # Answers are keyed by UID, so a claim that is named twice is asked for once.
        distinct = tuple({claim.uid: claim for claim in reversed(claims)}.values())[::-1]
        if not distinct:
            return {}
        self._await_first_look(driver)
        batch = Batch(
            operation,
            driver,
            distinct,
            registry=self._registry,
            settings=self._settings,
            clock=self._clock,
            closed=self._closed,
            explain=self.explain,
            turns=self._turns,
            notices=self._notices,
            permanent_error=self._is_permanent,
        )
        return batch.run()

    def _is_permanent(self, error: DriverError) -> bool:
        if self._permanent_error is None:
            return False
        try:
            return bool(self._permanent_error(error))
        except Exception as bug:  # noqa: BLE001 (foreign code; the call has to end all the same)
            facts = {"driver": error.driver, "error": repr(bug)}
            message = "permanent_error failed; the error counts as one that may heal"
            self._notices.log(_log, logging.ERROR, message, about=error.driver, extra=facts)
            return False

    def _await_first_look(self, driver: DriverName) -> None:
        if self._started_at is None or self._watcher.first_look.is_set():
            return
        known = self._registry.has(driver)
        limit_s = (
            min(_SIBLINGS_S, self._settings.first_look_s) if known else self._settings.first_look_s
        )
        left_s = self._started_at + limit_s - self._clock.monotonic()
        self._clock.wait(self._watcher.first_look, left_s)
