"""Watches the registry folder and registers the plugins whose sockets lie there."""

from __future__ import annotations

import logging
import socket as sockets
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from drastate.drivers.channel import CallFailedError, Graveyard
from drastate.drivers.folder import RegistryFolder, Socket
from drastate.drivers.handshake import Handshake, Introduction, check_introduction
from drastate.drivers.plugin import Plugin
from drastate.drivers.registry import DuplicateEndpointError, Registry
from drastate.drivers.validation import RegistrationRefusedError

if TYPE_CHECKING:
    from pathlib import Path

    from drastate.clock import Clock
    from drastate.config import Settings
    from drastate.drivers.notices import Notices
    from drastate.model import DriverName

_log = logging.getLogger(__name__)

#: Pause after the first failed handshake with a socket; doubled each time. Source: kubelet
#: pluginmanager, 500 ms.
_BACKOFF_FIRST_S = 0.5

#: Longest pause. Source: kubelet pluginmanager, 2 min. A restarted plugin makes a new socket, which
#: is tried at once.
_BACKOFF_MAX_S = 120.0

#: How long a handshake counts as quick. A good plugin answers in milliseconds, a busy node has it
#: take tens of them. Arbitrary; longer, and many sockets that never answer delay a good one for
#: longer.
_QUICK_S = 0.25

#: How many quick handshakes run at once. Arbitrary, for a node has a handful of plugins; this many
#: every `_QUICK_S` is the least rate at which new sockets are tried, whatever the others do.
_QUICK_MAX = 32

#: How many may take longer, up to their timeouts. What is not quick while there are so many gives
#: way and is tried again after a pause. Arbitrary; it bounds threads and files.
_SLOW_MAX = 16

#: How often a socket gives way before it is left alone until one of the slow has ended. More than
#: once: a good plugin may be late once when the node is busy. Not for ever: a plugin that is always
#: slow has to get its time as well.
_GIVE_WAY_MAX = 2

#: Pause between two looks at the time that handshakes take. Arbitrary, well below `_QUICK_S`.
_TICK_S = 0.05

#: How long `close` waits for threads that it has told to end. Arbitrary; they end in milliseconds.
_CLOSE_S = 0.5

#: How long a handshake's thread waits for the plugin's connection before the socket counts as
#: handled. Arbitrary; a local connection takes milliseconds. It only matters for the first look:
#: the newest plugin should be ready by then.
_CONNECT_S = 0.5


@dataclass(slots=True, eq=False)
class _Run:
    """A handshake that is running."""

    entry: _Entry
    handshake: Handshake
    thread: threading.Thread
    started: float
    slow: bool = False
    gave_way: bool = False


@dataclass(slots=True, eq=False)
class _Entry:
    """A socket in the folder, and how far its registration is. Guarded by the watcher's lock."""

    socket: Socket
    order: int
    due: float
    plugin: Plugin | None = None
    driver: DriverName | None = None
    failures: int = 0
    ways_given: int = 0
    kind: str | None = None
    problem: str | None = None
    tried: bool = False
    final: bool = False
    gone: bool = False


class Watcher:
    """Keeps the registry in step with the folder.

    Sockets get their order when they are first seen; those seen in one look by the time they were
    made. So after a restart of ours the newest plugin is preferred as before, whatever order the
    folder is read in.

    A socket that is replaced (other inode or time) is taken out and registered anew. Handshakes run
    in threads of their own, one at a time per path. Those that hang cannot delay the others: only
    so many may, and the rest gives way (see `_QUICK_S`).

    Source:
        kubelet pkg/kubelet/pluginmanager.
    """

    def __init__(
        self,
        folder: Path,
        *,
        root: Path,
        registry: Registry,
        graveyard: Graveyard,
        notices: Notices,
        settings: Settings,
        clock: Clock,
    ) -> None:
        """Does not look yet.

        Args:
            folder: the registry folder, absolute.
            root: folder that all endpoints must lie in, absolute.
            registry: where plugins go.
            graveyard: for their channels; swept by the watcher's thread.
            notices: for the log.
            settings: poll period and handshake timeout.
            clock: for waiting and backoff.
        """
        self._folder = RegistryFolder(folder, clock)
        self._root = root
        self._registry = registry
        self._graveyard = graveyard
        self._notices = notices
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._running: dict[str, _Run] = {}
        self._orders = 0
        self._first: list[_Entry] | None = None
        self._closed = threading.Event()
        # Set when a handshake has ended, so that the next one need not wait for the next look.
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        #: Set once every socket of the first look has been tried.
        self.first_look = threading.Event()

    def start(self) -> None:
        """Starts the thread."""
        self._thread = threading.Thread(target=self._run, name="drastate-registry", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops the thread and the handshakes, even those that hang, within a second or so."""
        self._closed.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=_CLOSE_S)
        with self._lock:
            running = tuple(self._running.values())
        for run in running:
            run.handshake.cancel()
        deadline = self._clock.monotonic() + _CLOSE_S
        for run in running:
            run.thread.join(timeout=max(0.0, deadline - self._clock.monotonic()))
        self.first_look.set()

    def find_problem(self, driver: DriverName) -> str | None:
        """Why a socket of ``driver`` is there but not registered; None when nothing is known."""
        with self._lock:
            problems = [
                f"{entry.socket.path}: {entry.problem}"
                for entry in self._entries.values()
                if entry.driver == driver and entry.problem is not None
            ]
        return "; ".join(problems) or None

    # --- the watcher's thread ---------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                self._look()
            except Exception:  # noqa: BLE001 (see below)
                # Without this thread no driver would ever be found again, and nothing would say so.
                _log.exception("a look at the plugin registry folder failed; it is repeated")
            self._clock.wait(self._wake, self._pause_s())
            if self._closed.is_set():
                return
            self._wake.clear()

    def _pause_s(self) -> float:
        with self._lock:
            is_quick = any(not run.slow for run in self._running.values())
        poll_s = self._settings.registry_poll_s
        return min(poll_s, _TICK_S) if is_quick else poll_s

    def _look(self) -> None:
        found = self._folder.look()
        if found is not None:
            self._compare(found)
        self._stop_slow_handshakes()
        self._start_handshakes()
        self._registry.refresh()
        self._graveyard.sweep()
        self._check_first_look()

    def _compare(self, found: frozenset[Socket]) -> None:
        present = {socket.path: socket for socket in found}
        with self._lock:
            lost = [e for e in self._entries.values() if present.get(e.socket.path) != e.socket]
        # First out, then in: the same endpoint may come back under another registration socket.
        for entry in lost:
            self._drop(entry)
        with self._lock:
            fresh = [socket for socket in found if socket.path not in self._entries]
            for socket in sorted(fresh, key=lambda each: (each.mtime_ns, each.path)):
                self._orders += 1
                entry = _Entry(socket, self._orders, due=self._clock.monotonic())
                self._entries[socket.path] = entry
            if self._first is None:
                self._first = list(self._entries.values())

    def _drop(self, entry: _Entry) -> None:
        with self._lock:
            entry.gone = True
            self._entries.pop(entry.socket.path, None)
            run = self._running.get(entry.socket.path)
            plugin, entry.plugin = entry.plugin, None
        if run is not None:
            run.handshake.cancel()
        if plugin is not None:
            self._deregister(plugin)

    def _stop_slow_handshakes(self) -> None:
        now = self._clock.monotonic()
        with self._lock:
            running = sorted(self._running.values(), key=lambda run: run.started)
            late = [run for run in running if not run.slow and now - run.started >= _QUICK_S]
            free = self._count_free_slow()
            for run in late[:free]:
                run.slow = True
            for run in late[free:]:
                run.slow = run.gave_way = True
        for run in late[free:]:
            run.handshake.cancel()

    def _count_free_slow(self) -> int:
        # One that has given way is as good as over.
        slow = sum(run.slow and not run.gave_way for run in self._running.values())
        return max(0, _SLOW_MAX - slow)

    def _start_handshakes(self) -> None:
        now = self._clock.monotonic()
        with self._lock:
            due = [
                entry
                for entry in self._entries.values()
                if entry.plugin is None
                and not entry.final
                and entry.due <= now
                and entry.socket.path not in self._running
            ]
            # New sockets before those that failed already, so that many that hang do not starve one
            # that works.
            due.sort(key=lambda entry: (entry.failures, entry.ways_given, entry.due, entry.order))
            quick = [entry for entry in due if entry.ways_given < _GIVE_WAY_MAX]
            slow = [entry for entry in due if entry.ways_given >= _GIVE_WAY_MAX]
            free = _QUICK_MAX - sum(not run.slow for run in self._running.values())
            for entry in quick[:free]:
                self._start_handshake(entry, now)
            for entry in slow[: self._count_free_slow()]:
                self._start_handshake(entry, now, slow=True)

    def _start_handshake(self, entry: _Entry, now: float, *, slow: bool = False) -> None:
        path = entry.socket.path
        try:
            handshake = Handshake(
                entry.socket, self._settings.registration_timeout_s, self._graveyard
            )
        except OSError as error:
            self._put_off(path, f"no more files: {error.strerror}")
            return
        run = _Run(entry, handshake, threading.current_thread(), now, slow)
        run.thread = threading.Thread(
            target=self._shake, args=(run,), name="drastate-handshake", daemon=True
        )
        self._running[path] = run
        try:
            run.thread.start()
        except RuntimeError as error:
            del self._running[path]
            handshake.close()
            self._put_off(path, str(error))

    def _put_off(self, path: str, problem: str) -> None:
        """Says that a socket has to wait for the next look."""
        facts = {"endpoint": path, "problem": problem}
        message = "a plugin socket has to wait"
        self._notices.log(_log, logging.WARNING, message, about=path, extra=facts)

    def _check_first_look(self) -> None:
        with self._lock:
            if self._first is None or not all(entry.tried or entry.gone for entry in self._first):
                return
            self._first = []
        self.first_look.set()

    # --- a handshake's thread ---------------------------------------------------------------------

    def _shake(self, run: _Run) -> None:
        entry = run.entry
        try:
            self._register(entry, run.handshake)
        except RegistrationRefusedError as refused:
            entry.driver = refused.driver or entry.driver
            self._note_failure(entry, refused.reason, f"refused: {refused.reason}", refused.final)
        except CallFailedError as failure:
            problem = f"no answer to the handshake: {failure.code} {failure.details}"
            if run.gave_way:
                self._note_way_given(entry)
            else:
                self._note_failure(entry, failure.code, problem)
        except OSError as error:
            self._note_failure(entry, repr(error), f"the handshake failed: {error.strerror}")
        except Exception as error:  # noqa: BLE001 (one socket must not end the others)
            _log.exception("a registration failed", extra={"endpoint": entry.socket.path})
            self._note_failure(entry, repr(error), f"the handshake failed: {error!r}")
        finally:
            run.handshake.close()
            with self._lock:
                entry.tried = True
                del self._running[entry.socket.path]
            self._check_first_look()
            self._wake.set()

    def _register(self, entry: _Entry, handshake: Handshake) -> None:
        info = handshake.ask()
        try:
            introduction = check_introduction(info, socket=entry.socket.path, root=self._root)
            entry.driver = introduction.driver
            plugin = self._add(entry, introduction)
        except RegistrationRefusedError as refused:
            self._tell_refusal(handshake, refused.reason)
            raise
        try:
            handshake.tell(None)
        except CallFailedError:
            # The plugin does not know that it is registered, and may give up; it gets another
            # chance to hear it.
            self._deregister(plugin)
            raise
        with self._lock:
            if entry.gone:
                kept = False
            else:
                kept, entry.plugin = True, plugin
                entry.failures = entry.ways_given = 0
                entry.kind = entry.problem = None
        if not kept:
            self._deregister(plugin)
            return
        facts = {"driver": plugin.driver, "endpoint": plugin.endpoint, "api": plugin.api.version}
        self._notices.log(
            _log, logging.INFO, "registered a plugin", about=plugin.driver, extra=facts
        )
        self._await_connection(plugin)

    @staticmethod
    def _tell_refusal(handshake: Handshake, reason: str) -> None:
        try:
            handshake.tell(reason)
        except CallFailedError as failure:
            # Drivers built on the kubelet's helper answer a refusal with an error of their own. It
            # was heard.
            _log.debug("a refused plugin did not confirm", extra={"endpoint": failure.endpoint})

    def _add(self, entry: _Entry, introduction: Introduction) -> Plugin:
        plugin = Plugin(
            introduction.driver,
            introduction.endpoint,
            introduction.api,
            root=self._root,
            registration_socket=entry.socket.path,
            order=entry.order,
            clock=self._clock,
            graveyard=self._graveyard,
            notices=self._notices,
        )
        try:
            try:
                self._registry.add(plugin)
            except DuplicateEndpointError as duplicate:
                # A killed plugin leaves its registration socket behind. When its successor uses the
                # same endpoint under another registration socket, the dead one must not stand in
                # its way.
                if is_listening(duplicate.plugin.registration_socket):
                    raise
                self._forget(duplicate.plugin)
                self._registry.add(plugin)
        except DuplicateEndpointError as duplicate:
            plugin.retire()
            raise RegistrationRefusedError(str(duplicate)) from None
        return plugin

    def _forget(self, plugin: Plugin) -> None:
        with self._lock:
            for entry in self._entries.values():
                if entry.plugin is plugin:
                    entry.plugin = None
                    entry.due = self._clock.monotonic() + _BACKOFF_FIRST_S
        self._deregister(plugin)

    def _deregister(self, plugin: Plugin) -> None:
        self._registry.remove(plugin)
        facts = {"driver": plugin.driver, "endpoint": plugin.endpoint}
        self._notices.log(
            _log, logging.INFO, "deregistered a plugin", about=plugin.driver, extra=facts
        )

    def _await_connection(self, plugin: Plugin) -> None:
        deadline = self._clock.monotonic() + _CONNECT_S
        while not (plugin.connected or plugin.retired) and self._clock.monotonic() < deadline:
            if self._clock.wait(self._closed, 0.01):
                return

    def _note_way_given(self, entry: _Entry) -> None:
        with self._lock:
            entry.ways_given += 1
            entry.due = self._clock.monotonic() + _BACKOFF_FIRST_S
            entry.problem = (
                f"no answer to the handshake within {_QUICK_S:g} s; more time is given when fewer "
                "others take long"
            )

    def _note_failure(
        self,
        entry: _Entry,
        kind: str,
        problem: str,
        final: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        with self._lock:
            pause_s = min(_BACKOFF_MAX_S, _BACKOFF_FIRST_S * 2 ** min(entry.failures, 20))
            entry.failures += 1
            entry.ways_given = 0
            entry.due = self._clock.monotonic() + pause_s
            entry.final = final
            is_news = kind != entry.kind and not entry.gone and not self._closed.is_set()
            entry.kind, entry.problem = kind, problem
        if is_news:
            # A final one is a plugin for somebody else, which is nothing to warn of.
            facts = {"driver": entry.driver, "endpoint": entry.socket.path, "problem": problem}
            level = logging.DEBUG if final else logging.WARNING
            message = "a plugin socket is not registered"
            self._notices.log(_log, level, message, about=entry.socket.path, extra=facts)


def is_listening(path: str) -> bool:
    """Whether a process listens on the socket at ``path``; the file alone does not say."""
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:
            return True
        except OSError:
            return False
    return True
