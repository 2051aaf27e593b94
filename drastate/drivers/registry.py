"""Which plugins there are, and which one to call."""

from __future__ import annotations

import logging
import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from drastate.clock import Clock
    from drastate.drivers.plugin import Plugin, PluginInfo
    from drastate.model import DriverName

_log = logging.getLogger(__name__)

#: Pause between two looks for a connection while a call waits for one. Arbitrary; far below what a
#: person notices.
_LOOK_S = 0.02


class DuplicateEndpointError(Exception):
    """Driver and endpoint are registered already, from another socket. Does not leave this room.

    Attributes:
        plugin: the one that is registered.
    """

    def __init__(self, plugin: Plugin) -> None:
        super().__init__(
            f"driver {plugin.driver} is registered at endpoint {plugin.endpoint} already, through "
            f"{plugin.registration_socket}"
        )
        self.plugin = plugin


class NoPluginError(Exception):
    """There is nothing to call. Does not leave this room.

    Attributes:
        info: the plugin that would be called if it were connected; None when none is registered.
    """

    def __init__(self, info: PluginInfo | None) -> None:
        super().__init__()
        self.info = info


class Registry:
    """The plugins of each driver, oldest first.

    Several plugins of one driver exist during a rolling update. The newest that is connected is
    called; the order is that in which their registration sockets were made (see `Watcher`), so it
    does not depend on how fast each of them answers the handshake.

    Source:
        kubelet dra_plugin_manager.go, get: last registered that is connected.
    """

    def __init__(self, clock: Clock) -> None:
        """Begins empty.

        Args:
            clock: for waiting.
        """
        self._clock = clock
        self._lock = threading.Lock()
        self._plugins: dict[DriverName, list[Plugin]] = {}
        # Those that were taken out and have calls in flight still are here too.
        self._alive: weakref.WeakSet[Plugin] = weakref.WeakSet()
        self._news = _News()
        self._closed = threading.Event()

    def add(self, plugin: Plugin) -> None:
        """Registers ``plugin`` and starts its connection.

        Raises:
            DuplicateEndpointError: its driver and endpoint are registered already.
        """
        with self._lock:
            siblings = self._plugins.get(plugin.driver, [])
            for sibling in siblings:
                if sibling.endpoint == plugin.endpoint:
                    raise DuplicateEndpointError(sibling)
            self._plugins[plugin.driver] = sorted([*siblings, plugin], key=lambda each: each.order)
            self._alive.add(plugin)
            closed = self._closed.is_set()
        if closed:
            self.remove(plugin)
            return
        plugin.connect(lambda connected: self._news.tell(connected.driver))

    def remove(self, plugin: Plugin) -> None:
        """Takes ``plugin`` out; calls in flight may end. Does nothing when it is out already."""
        with self._lock:
            siblings = [each for each in self._plugins.get(plugin.driver, []) if each is not plugin]
            if siblings:
                self._plugins[plugin.driver] = siblings
            else:
                self._plugins.pop(plugin.driver, None)
        plugin.retire()

    def has(self, driver: DriverName) -> bool:
        """Whether a plugin of ``driver`` is registered, connected or not."""
        with self._lock:
            return driver in self._plugins

    def list_drivers(self) -> tuple[DriverName, ...]:
        """The registered drivers by name."""
        with self._lock:
            return tuple(sorted(self._plugins))

    def list_plugins(self) -> tuple[PluginInfo, ...]:
        """The registered plugins by driver, the oldest of each first."""
        with self._lock:
            plugins = [each for name in sorted(self._plugins) for each in self._plugins[name]]
        return tuple(plugin.info for plugin in plugins)

    def refresh(self) -> None:
        """Has the plugins that are disconnected look at their sockets again; never blocks."""
        with self._lock:
            plugins = [each for siblings in self._plugins.values() for each in siblings]
        for plugin in plugins:
            plugin.refresh()

    def get_connected(self, driver: DriverName, wait_s: float) -> Plugin:
        """The plugin to call.

        Args:
            driver: its name.
            wait_s: how long to wait for a connection when there is none right now.

        Raises:
            NoPluginError: none is registered, or none is connected within ``wait_s``.
        """
        deadline = self._clock.monotonic() + wait_s
        while True:
            with self._lock:
                plugins = self._plugins.get(driver, [])
            for plugin in reversed(plugins):
                if plugin.connected:
                    return plugin
            left_s = deadline - self._clock.monotonic()
            if not plugins or left_s <= 0 or self._closed.is_set():
                raise NoPluginError(plugins[-1].info if plugins else None)
            self._clock.wait(self._closed, min(_LOOK_S, left_s))

    def on_registered(self, callback: Callable[[DriverName], None]) -> None:
        """Has ``callback`` called whenever a driver gets a plugin that can be called.

        All callbacks run in one thread of their own, so they may take their time.
        """
        self._news.callbacks.append(callback)

    def close(self) -> None:
        """Takes all plugins out and cancels their calls, also of those taken out before."""
        with self._lock:
            self._closed.set()
            self._plugins.clear()
            alive = list(self._alive)
        self._news.close()
        for plugin in alive:
            plugin.retire(cancel=True)


class _News:
    """Calls callbacks in a thread that starts with the first news."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[DriverName], None]] = []
        # A dictionary as an ordered set: a callback that hangs cannot make it grow beyond the
        # number of drivers.
        self._pending: dict[DriverName, None] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def tell(self, driver: DriverName) -> None:
        """Never blocks."""
        with self._changed:
            if self._closed or not self.callbacks:
                return
            self._pending[driver] = None
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="drastate-driver-news", daemon=True
                )
                self._thread.start()

    def close(self) -> None:
        """Ends the thread after the callback it is in, without waiting for it."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _run(self) -> None:
        while (driver := self._next()) is not None:
            for callback in tuple(self.callbacks):
                try:
                    callback(driver)
                except Exception:  # noqa: BLE001 (foreign code; the next callback must still run)
                    _log.exception("a callback for a registered driver failed")

    def _next(self) -> DriverName | None:
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._closed)
            if self._closed:
                return None
            driver = next(iter(self._pending))
            del self._pending[driver]
            return driver


def describe_disconnected(info: PluginInfo) -> str:
    """How a plugin stands that cannot be called, and what to do about it, for a message."""
    since = info.since.strftime("%Y-%m-%dT%H:%M:%SZ")
    stands = f"registered at {info.endpoint}, disconnected since {since}"
    if info.problem is not None:
        return f"{stands}, and not connected to again: {info.problem}; see the driver's log"
    return f"{stands}; start the driver again or see its log"
