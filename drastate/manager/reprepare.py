"""Has a driver that registers anew prepare again what live pods use (`reprepare_on_register`)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from drastate.clock import Clock
from drastate.errors import DrastateError, ManagerClosedError
from drastate.manager.context import Failures
from drastate.model import DriverName

_log = logging.getLogger(__name__)

#: Pause after a run: a driver that registers in a loop is asked once per pause. Doubles with each
#: failing run, up to a minute. Arbitrary.
_PAUSE_FIRST_S = 1.0
_PAUSE_MAX_S = 60.0


class Repreparer:
    """One thread for each driver that has something to prepare again; none otherwise."""

    def __init__(
        self,
        prepare_anew: Callable[[DriverName], Failures],
        operating: Callable[[], AbstractContextManager[None]],
        clock: Clock,
    ) -> None:
        """Does nothing until a driver registers.

        Args:
            prepare_anew: one run for a driver; what failed.
            operating: entered for each run; raises `ManagerClosedError` once there are to be none.
            clock: the time.
        """
        self._prepare_anew = prepare_anew
        self._operating = operating
        self._clock = clock
        self._mutex = threading.Lock()
        self._news: dict[DriverName, threading.Event] = {}
        self._closed = threading.Event()

    def driver_registered(self, driver: DriverName) -> None:
        """Starts a run for the driver, or has the thread that is at it make another."""
        with self._mutex:
            if self._closed.is_set():
                return
            if (news := self._news.get(driver)) is not None:
                news.set()
                return
            news = self._news[driver] = threading.Event()
        threading.Thread(
            target=self._run, args=(driver, news), name=f"drastate-anew-{driver}", daemon=True
        ).start()

    def close(self) -> None:
        """Ends the pauses; no run begins after it."""
        with self._mutex:
            self._closed.set()
            for news in self._news.values():
                news.set()

    def _run(self, driver: DriverName, news: threading.Event) -> None:
        pause_s = _PAUSE_FIRST_S
        while not self._closed.is_set():
            news.clear()
            failed = self._try(driver)
            self._clock.wait(self._closed, _PAUSE_FIRST_S)
            if failed:
                self._clock.wait(news, pause_s - _PAUSE_FIRST_S)
                pause_s = min(_PAUSE_MAX_S, 2 * pause_s)
            with self._mutex:
                if not failed and not news.is_set():
                    del self._news[driver]
                    return

    def _try(self, driver: DriverName) -> bool:
        """One run; whether anything has to be tried again."""
        try:
            with self._operating():
                failures = self._prepare_anew(driver)
        except ManagerClosedError:
            return False
        except DrastateError as error:
            _log.warning(
                "a driver registered anew, but nothing could be prepared again; will retry",
                extra={"driver": driver, "error": str(error)},
            )
            return True
        except Exception:  # noqa: BLE001 (told, and tried again)
            _log.exception(
                "preparing again failed, will retry; please report this", extra={"driver": driver}
            )
            return True
        return any(error.can_retry for errors in failures.values() for error in errors)
