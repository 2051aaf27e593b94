"""One batched call to a driver with its retries: the only place where a driver call is repeated."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias, get_args

import tenacity

from drastate.drivers import answers
from drastate.drivers.channel import ANSWER_MAX_BYTES, CallFailedError
from drastate.drivers.plugin import UnreadableAnswerError
from drastate.drivers.registry import NoPluginError, Registry, describe_disconnected
from drastate.drivers.turns import NoTurnError, Turns
from drastate.errors import (
    DriverError,
    DriverNotRegisteredError,
    DriverProtocolError,
    DriverRefusedError,
    DriverUnavailableError,
)
from drastate.model import CallResult, ClaimRef, ClaimUID, DriverName, Operation

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping, Sequence

    from drastate.clock import Clock
    from drastate.config import PermanentError, Settings
    from drastate.drivers.notices import Notices
    from drastate.drivers.plugin import Plugin

_log = logging.getLogger(__name__)

#: Statuses after which a call is repeated: the transport failed, or the server gave up before our
#: own deadline. One timeout has several faces (local deadline, RST_STREAM), which is why they count
#: alike, and why nothing here looks at texts.
_TRANSIENT = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"})

#: Statuses that do not prove that the driver has answered. INTERNAL is what the gRPC library itself
#: reports for a stream that was reset, so such a call may still be running in the driver. It is not
#: repeated, though.
_UNANSWERED = _TRANSIENT | {"INTERNAL"}

#: How long a call waits for a connection when no plugin of its driver has one. Arbitrary; long
#: enough for a connection that is just being made or made anew, short enough to fail fast when the
#: driver is down.
_RECONNECT_S = 0.5

#: What must be left of the budget for another attempt. Arbitrary: less than this, and a driver that
#: is back could hardly answer. The last pause is cut so that it is left.
_ATTEMPT_MIN_S = 0.1

_Failure: TypeAlias = CallFailedError | NoPluginError | NoTurnError | UnreadableAnswerError
_FAILURES = get_args(_Failure)


class Batch:
    """One call for several claims of one driver.

    The plugin is chosen anew for each attempt, so when the newest one dies the next attempt goes to
    the one before.
    """

    def __init__(
        self,
        operation: Operation,
        driver: DriverName,
        claims: Sequence[ClaimRef],
        *,
        registry: Registry,
        settings: Settings,
        clock: Clock,
        closed: threading.Event,
        explain: Callable[[DriverName], str],
        turns: Turns,
        notices: Notices,
        permanent_error: PermanentError,
    ) -> None:
        """Calls nothing yet; the budget starts now.

        Args:
            operation: what to do.
            driver: whom to ask.
            claims: what for; no UID twice.
            registry: where its plugins are.
            settings: budget and pauses.
            clock: for both.
            closed: ends the retries.
            explain: how a driver stands, for messages.
            turns: who may call now.
            notices: for the log.
            permanent_error: ends the retries for an error that cannot heal.
        """
        self._operation = operation
        self._driver = driver
        self._claims = claims
        self._registry = registry
        self._settings = settings
        self._clock = clock
        self._closed = closed
        self._explain = explain
        self._turns = turns
        self._notices = notices
        self._permanent_error = permanent_error
        self._deadline = clock.monotonic() + settings.call_timeout_s
        self._sent = False
        self._lost = False
        self._last: CallFailedError | None = None

    def run(self) -> dict[ClaimUID, CallResult]:
        """Makes the call, and repeats it within the budget.

        Returns:
            A result for each claim.
        """
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(self._is_worth_repeating),
            stop=self._is_over,
            wait=self._pause_s,
            sleep=self._sleep,
            reraise=True,
        )
        try:
            answer = retrying(self._attempt)
        except _FAILURES as failure:
            return {claim.uid: self._make_failure(failure, claim) for claim in self._claims}
        return {
            uid: replace(result, answered=not self._lost) for uid, result in answer.results.items()
        }

    # --- one attempt ------------------------------------------------------------------------------

    def _attempt(self) -> answers.Answer:
        # A turn for each attempt: one that is not calling must not keep others from it.
        with self._turns.take(self._driver, self._left_s):
            return self._call()

    def _call(self) -> answers.Answer:
        plugin = self._registry.get_connected(
            self._driver, wait_s=min(_RECONNECT_S, max(0.0, self._left_s()))
        )
        try:
            answer = self._ask(plugin)
        except CallFailedError as failure:
            self._sent |= failure.sent
            self._lost |= failure.sent and failure.code in _UNANSWERED
            if failure.sent:
                self._last = failure
            raise
        except UnreadableAnswerError:
            self._sent = True
            raise
        self._sent = True
        if answer.foreign:
            facts = {
                "driver": self._driver,
                "endpoint": plugin.endpoint,
                "claim_uid": [uid[:64] for uid in answer.foreign],
            }
            message = "a driver answered for claims that it was not asked about"
            self._notices.log(_log, logging.WARNING, message, about=self._driver, extra=facts)
        return answer

    def _ask(self, plugin: Plugin) -> answers.Answer:
        driver, endpoint = self._driver, plugin.endpoint
        timeout_s = max(_ATTEMPT_MIN_S, self._left_s())
        if self._operation is Operation.PREPARE:
            prepared = plugin.prepare(self._claims, timeout_s)
            return answers.read_prepare(prepared, self._claims, driver=driver, endpoint=endpoint)
        unprepared = plugin.unprepare(self._claims, timeout_s)
        return answers.read_unprepare(unprepared, self._claims, driver=driver, endpoint=endpoint)

    # --- the retries ------------------------------------------------------------------------------

    def _left_s(self) -> float:
        return self._deadline - self._clock.monotonic()

    def _is_worth_repeating(self, failure: BaseException) -> bool:
        if not isinstance(failure, CallFailedError) or failure.code not in _TRANSIENT:
            return False
        # The whole call failed, so it is the same error for every claim.
        return not self._permanent_error(self._make_error(failure, self._claims[0]))

    def _is_over(self, _: tenacity.RetryCallState) -> bool:
        return self._closed.is_set() or self._left_s() <= _ATTEMPT_MIN_S

    def _sleep(self, pause_s: float) -> None:
        self._clock.wait(self._closed, pause_s)

    def _pause_s(self, state: tenacity.RetryCallState) -> float:
        if self._last is None:
            # The plugin left between choice and call. Nothing was sent and the next choice is
            # another one.
            return 0.0
        longest_s: float = min(
            self._settings.retry_max_s,
            self._settings.retry_initial_s * 2 ** min(state.attempt_number - 1, 32),
        )
        pause_s = longest_s * self._clock.jitter(0.5, 1.0)
        return max(0.0, min(pause_s, self._left_s() - _ATTEMPT_MIN_S))

    # --- failures of the whole call ---------------------------------------------------------------

    def _make_failure(self, failure: _Failure, claim: ClaimRef) -> CallResult:
        error = self._make_error(failure, claim)
        error.__cause__ = self._last.error if self._last is not None else None
        return CallResult(error=error, called=self._sent, answered=not self._lost)

    def _make_error(self, failure: _Failure, claim: ClaimRef) -> DriverError:
        whose = {"driver": self._driver, "claim": str(claim), "claim_uid": claim.uid}
        if isinstance(failure, UnreadableAnswerError):
            message = (
                f"driver {self._driver} answered {self._operation} for claim {claim} with bytes "
                "that are no such message; report it to the driver's author"
            )
            return DriverProtocolError(message, endpoint=failure.endpoint, **whose)
        if self._closed.is_set() or isinstance(failure, NoTurnError | NoPluginError):
            return self._make_not_asked_error(failure, claim, whose)
        details = answers.shorten(failure.details)
        if failure.code in _TRANSIENT:
            message = (
                f"driver {self._driver} did not answer within {self._settings.call_timeout_s:g} s "
                f"when asked to {self._verb} claim {claim} ({failure.code}: {details}); see the "
                "driver's log"
            )
            return DriverUnavailableError(
                message, endpoint=failure.endpoint, code=failure.code, **whose
            )
        message = (
            f"driver {self._driver} refused {self._operation} for claim {claim} with "
            f"{failure.code}: {details}"
        )
        if failure.code == "RESOURCE_EXHAUSTED":
            message += f" (an answer may have {ANSWER_MAX_BYTES >> 20} MiB, as at the kubelet)"
        return DriverRefusedError(message, endpoint=failure.endpoint, code=failure.code, **whose)

    def _make_not_asked_error(
        self, failure: _Failure, claim: ClaimRef, whose: Mapping[str, str]
    ) -> DriverError:
        """Why there is no attempt (any more); attempts before may have been made in vain."""
        code = self._last.code if self._last is not None else None
        if self._last is None:
            what = f"driver {self._driver} cannot be asked to {self._verb} claim {claim}"
        else:
            what = (
                f"driver {self._driver} did not answer ({code}) when asked to {self._verb} "
                f"claim {claim}"
            )
        if self._closed.is_set():
            return DriverUnavailableError(f"{what}: drastate is shutting down", code=code, **whose)
        if isinstance(failure, NoTurnError):
            message = (
                f"{what}: no turn within {self._settings.call_timeout_s:g} s, as it is sent only "
                f"{failure.limit} calls at a time (setting driver_concurrency) and others came "
                "first; see the driver's log for why they take so long"
            )
            return DriverUnavailableError(message, code=code, **whose)
        info = failure.info if isinstance(failure, NoPluginError) else None
        if info is None:
            message = f"{what}: it is {self._explain(self._driver)}"
            return DriverNotRegisteredError(message, **whose)
        message = f"{what}: it is {describe_disconnected(info)}"
        return DriverUnavailableError(message, endpoint=info.endpoint, code=code, **whose)

    @property
    def _verb(self) -> str:
        return "prepare" if self._operation is Operation.PREPARE else "unprepare"
