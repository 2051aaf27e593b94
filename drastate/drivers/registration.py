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
    from drastate.model import DriverName

_log = logging.getLogger(__name__)

#: Pause after the first failed handshake with a socket; doubled each time. Source: kubelet
#: pluginmanager, 500 ms.
_BACKOFF_FIRST_S = 0.5

#: Longest pause. Source: kubelet pluginmanager, 2 min. A restarted plugin makes a new socket, which
#: is tried at once.
_BACKOFF_MAX_S = 120.0

#: How many handshakes run at once. Each may hang for its whole timeout; arbitrary, a node has a
#: handful of plugins.
_HANDSHAKES_MAX = 16

#: How long `close` waits for threads that it has told to end. Arbitrary; they end in milliseconds.
_CLOSE_S = 0.5

#: How long a handshake's thread waits for the plugin's connection before the socket counts as
#: handled. Arbitrary; a local connection takes milliseconds. It only matters for the first look:
#: the newest plugin should be ready by then.
_CONNECT_S = 0.5


@dataclass(slots=True, eq=False)
class _Entry:
    """A socket in the folder, and how far its registration is. Guarded by the watcher's lock."""

    socket: Socket
    order: int
    due: float
    handshake: Handshake | None = None
    plugin: Plugin | None = None
    driver: DriverName | None = None
    failures: int = 0
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
    in threads of their own, one at a time per path, so that one that hangs delays no other.

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
        settings: Settings,
        clock: Clock,
    ) -> None:
        """Does not look yet.

        Args:
            folder: the registry folder, absolute.
            root: folder that all endpoints must lie in, absolute.
            registry: where plugins go.
            graveyard: for their channels; swept by the watcher's thread.
            settings: poll period and handshake timeout.
            clock: for waiting and backoff.
        """
        self._folder = RegistryFolder(folder, clock)
        self._root = root
        self._registry = registry
        self._graveyard = graveyard
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._busy: set[str] = set()
        self._handshakes: dict[Handshake, threading.Thread] = {}
        self._orders = 0
        self._first: list[_Entry] | None = None
        self._closed = threading.Event()
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
        if self._thread is not None:
            self._thread.join(timeout=_CLOSE_S)
        with self._lock:
            handshakes = tuple(self._handshakes.items())
        for handshake, _ in handshakes:
            handshake.cancel()
        deadline = self._clock.monotonic() + _CLOSE_S
        for _, thread in handshakes:
            thread.join(timeout=max(0.0, deadline - self._clock.monotonic()))
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
            if self._clock.wait(self._closed, self._settings.registry_poll_s):
                return

    def _look(self) -> None:
        found = self._folder.look()
        if found is not None:
            self._compare(found)
        self._start_handshakes()
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
            handshake, plugin, entry.plugin = entry.handshake, entry.plugin, None
        if handshake is not None:
            handshake.cancel()
        if plugin is not None:
            self._deregister(plugin)

    def _start_handshakes(self) -> None:
        now = self._clock.monotonic()
        with self._lock:
            due = [
                entry
                for entry in self._entries.values()
                if entry.plugin is None
                and not entry.final
                and entry.due <= now
                and entry.socket.path not in self._busy
            ]
            # New sockets before those that failed already, so that many that hang do not starve one
            # that works.
            due.sort(key=lambda entry: (entry.failures, entry.order))
            for entry in due[: _HANDSHAKES_MAX - len(self._busy)]:
                self._start_handshake(entry)

    def _start_handshake(self, entry: _Entry) -> None:
        path = entry.socket.path
        handshake = Handshake(path, self._settings.registration_timeout_s)
        thread = threading.Thread(
            target=self._shake, args=(entry, handshake), name="drastate-handshake", daemon=True
        )
        self._busy.add(path)
        self._handshakes[handshake] = thread
        entry.handshake = handshake
        try:
            thread.start()
        except RuntimeError:
            # No more threads to be had; the next look tries again.
            _log.warning("a plugin socket has to wait for a thread", extra={"endpoint": path})
            handshake.close()
            entry.handshake = None
            del self._handshakes[handshake]
            self._busy.discard(path)

    def _check_first_look(self) -> None:
        with self._lock:
            if self._first is None or not all(entry.tried or entry.gone for entry in self._first):
                return
            self._first = []
        self.first_look.set()

    # --- a handshake's thread ---------------------------------------------------------------------

    def _shake(self, entry: _Entry, handshake: Handshake) -> None:
        try:
            self._register(entry, handshake)
        except RegistrationRefusedError as refused:
            entry.driver = refused.driver or entry.driver
            self._note_failure(entry, refused.reason, f"refused: {refused.reason}", refused.final)
        except CallFailedError as failure:
            problem = f"no answer to the handshake: {failure.code} {failure.details}"
            self._note_failure(entry, failure.code, problem)
        except Exception as error:  # noqa: BLE001 (one socket must not end the others)
            _log.exception("a registration failed", extra={"endpoint": entry.socket.path})
            self._note_failure(entry, repr(error), f"the handshake failed: {error!r}")
        finally:
            handshake.close()
            with self._lock:
                entry.handshake = None
                entry.tried = True
                self._handshakes.pop(handshake, None)
                self._busy.discard(entry.socket.path)
            self._check_first_look()

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
                entry.failures, entry.kind, entry.problem = 0, None, None
        if not kept:
            self._deregister(plugin)
            return
        facts = {"driver": plugin.driver, "endpoint": plugin.endpoint, "api": plugin.api.version}
        _log.info("registered a plugin", extra=facts)
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
            registration_socket=entry.socket.path,
            order=entry.order,
            clock=self._clock,
            graveyard=self._graveyard,
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
        _log.info("deregistered a plugin", extra=facts)

    def _await_connection(self, plugin: Plugin) -> None:
        deadline = self._clock.monotonic() + _CONNECT_S
        while not (plugin.connected or plugin.retired) and self._clock.monotonic() < deadline:
            if self._clock.wait(self._closed, 0.01):
                return

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
            entry.due = self._clock.monotonic() + pause_s
            entry.final = final
            is_news = kind != entry.kind and not entry.gone and not self._closed.is_set()
            entry.kind, entry.problem = kind, problem
        if is_news:
            # A final one is a plugin for somebody else, which is nothing to warn of.
            facts = {"driver": entry.driver, "endpoint": entry.socket.path, "problem": problem}
            level = logging.DEBUG if final else logging.WARNING
            _log.log(level, "a plugin socket is not registered", extra=facts)


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
