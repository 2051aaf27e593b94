"""Every exception that drastate raises on purpose. Imports nothing of ours.

    DrastateError                     never raised itself
      UsageError                      the caller's arguments (also a ValueError)
        InvalidPodError                 not a pod that we can read
        InvalidManifestError            a YAML or JSON file that is not what it should be
        ManagerClosedError              a call on a manager that is closed or was never started
      ClaimError                      the ResourceClaim is not in a state to be prepared
        ClaimNotCreatedError            the pod's status does not name the claim yet
        NotOwnedError                   made from a template, but for another pod
        NotReservedError                the pod is not in the claim's status.reservedFor
        NotAllocatedError               no status.allocation
        InvalidClaimError               the claim object lacks what every claim must have
        UIDMismatchError                an older claim of the same name is still held
        AllocationChangedError          allocated anew while a driver of before is still owed
        ClaimBusyError                  the claim is being unprepared right now
        NotPreparedError                devices asked for before they were prepared
      DriverError                     a DRA driver did not do its part
        DriverNotRegisteredError        no plugin of that name
        DriverUnavailableError          registered, but the call got no answer
        DriverRefusedError              the driver's answer names an error
        DriverProtocolError             the answer breaks the DRAPlugin protocol
      LedgerError                     the claim ledger
        LedgerBusyError                 another process is its writer, or holds its lock
        LedgerUnwritableError           disk full, read-only, I/O error, permissions
        LedgerNeedsUpgradeError         older schema, opened read-only
        LedgerTooNewError               written by a newer drastate
        LedgerCorruptError              not a ledger, or damaged
      ClusterError                    where ResourceClaims are read from
        ClaimNotFoundError
        ClusterForbiddenError
        ClusterUnavailableError
      PodResourcesError               several of the above, for one pod
        PrepareError
        UnprepareError
      InternalError                   a bug of ours: report it

Two class attributes answer the questions that callers ask of an error. ``retryable``: can the same
call succeed later without anybody changing its arguments? ``exit_code``: what the command line
returns for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class DrastateError(Exception):
    """The root of the tree; catch it to catch everything that drastate raises on purpose.

    Attributes:
        succeeded: claims ("namespace/name") of the same pod that did succeed although this error
            was raised; their success is durable and a retry does not repeat it.
    """

    retryable: ClassVar[bool] = False
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
        self.succeeded: tuple[str, ...] = ()

    @property
    def failures(self) -> tuple[DrastateError, ...]:
        """The single failures behind this error: itself, unless it is a `PodResourcesError`."""
        return (self,)

    @property
    def can_retry(self) -> bool:
        """Whether the same call may succeed later; of several failures, whether each may heal."""
        return all(type(failure).retryable for failure in self.failures)

    def __str__(self) -> str:
        if not self.succeeded:
            return self.message
        return f"{self.message} (done all the same: {', '.join(self.succeeded)})"


# --- the caller's arguments -----------------------------------------------------------------------


class UsageError(DrastateError, ValueError):
    """An argument or a setting that cannot be used; the text names it and what would be right."""

    exit_code: ClassVar[int] = 2


class InvalidPodError(UsageError):
    """What was passed as a pod lacks something that every pod has; the text names the field."""


class InvalidManifestError(UsageError):
    """A manifest file that cannot be read as YAML, or does not hold the object it should.

    Attributes:
        path: the file.
    """

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class ManagerClosedError(UsageError):
    """A manager was used after `close()`, or before `start()`."""


# --- ResourceClaims -------------------------------------------------------------------------------


class ClaimError(DrastateError):
    """A ResourceClaim is not in a state in which it can be prepared (or its devices handed out).

    Attributes:
        claim_uid: None while the claim's UID is not known.
        claim: "namespace/name", as far as known.
        pod_uid: the pod that wanted it.
    """

    retryable: ClassVar[bool] = True

    def __init__(
        self, message: str, *, claim: str, claim_uid: str | None = None, pod_uid: str | None = None
    ) -> None:
        super().__init__(message)
        self.claim = claim
        self.claim_uid = claim_uid
        self.pod_uid = pod_uid


class ClaimNotCreatedError(ClaimError):
    """A claim made from a template is not named in the pod's status.resourceClaimStatuses (yet)."""


class NotOwnedError(ClaimError):
    """A claim made from a template belongs to another pod."""

    retryable: ClassVar[bool] = False


class NotReservedError(ClaimError):
    """The pod is not in the claim's status.reservedFor."""


class NotAllocatedError(ClaimError):
    """The claim has no status.allocation."""


class InvalidClaimError(ClaimError):
    """The claim object lacks a field that every ResourceClaim has; the text names it."""

    retryable: ClassVar[bool] = False


class UIDMismatchError(ClaimError):
    """An older claim with the same name, but another UID, is still held by a pod.

    Attributes:
        held_uid: UID of the older claim.
    """

    def __init__(
        self, message: str, *, claim: str, held_uid: str, claim_uid: str, pod_uid: str | None = None
    ) -> None:
        super().__init__(message, claim=claim, claim_uid=claim_uid, pod_uid=pod_uid)
        self.held_uid = held_uid


class AllocationChangedError(ClaimError):
    """The claim was allocated anew, at other drivers, while what it had before is still held."""


class ClaimBusyError(ClaimError):
    """The claim is being unprepared for the pod before, or another call for it is in flight."""


class DeviceInUseError(ClaimError):
    """A device of the claim's allocation is still held by another claim.

    Attributes:
        device: "driver/pool/device".
        held_uid: UID of the claim that holds it.
    """

    def __init__(
        self,
        message: str,
        *,
        claim: str,
        claim_uid: str,
        device: str,
        held_uid: str,
        pod_uid: str | None = None,
    ) -> None:
        super().__init__(message, claim=claim, claim_uid=claim_uid, pod_uid=pod_uid)
        self.device = device
        self.held_uid = held_uid


class ClaimHeldError(ClaimError):
    """A claim cannot be abandoned: a live pod holds it, or nothing is owed for it."""

    retryable: ClassVar[bool] = False


class NotPreparedError(ClaimError):
    """Devices were asked for of a claim that is not prepared (for this pod, since this boot)."""


# --- DRA drivers ----------------------------------------------------------------------------------


class DriverError(DrastateError):
    """A DRA driver did not do its part.

    Attributes:
        driver: its name.
        endpoint: the socket that was (or would have been) called, None when there is none.
        claim: "namespace/name" when the error is about one claim.
        claim_uid: likewise.
        code: name of the gRPC status code the call ended with, such as "UNAVAILABLE"; None when no
            call was made, or the error came inside a good answer.
    """

    retryable: ClassVar[bool] = True

    def __init__(
        self,
        message: str,
        *,
        driver: str,
        endpoint: str | None = None,
        claim: str | None = None,
        claim_uid: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.driver = driver
        self.endpoint = endpoint
        self.claim = claim
        self.claim_uid = claim_uid
        self.code = code


class DriverNotRegisteredError(DriverError):
    """No plugin of that driver has registered (or none is left)."""


class DriverUnavailableError(DriverError):
    """The call got no answer: connection down, deadline passed, cancelled.

    Whether it had effects is unknown, unless ``code`` is None.
    """


class DriverRefusedError(DriverError):
    """The driver answered with an error, for one claim (``code`` is None) or for the whole call."""


class DriverPermanentError(DriverError):
    """The embedder's hook says that no repetition will mend it; ``__cause__`` is the error itself.

    It is not tried again before the driver registers anew, or the agent starts anew.
    """

    retryable: ClassVar[bool] = False


class DriverProtocolError(DriverError):
    """The answer breaks the DRAPlugin protocol: a claim left out, a malformed CDI device ID."""


# --- the ledger -----------------------------------------------------------------------------------


class LedgerError(DrastateError):
    """The claim ledger cannot be used.

    Attributes:
        path: the database file.
    """

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class LedgerBusyError(LedgerError):
    """Another process is the ledger's writer, or holds a lock on the file for too long.

    Attributes:
        pid: the process, None where it cannot be told.
    """

    retryable: ClassVar[bool] = True

    def __init__(self, message: str, *, path: str, pid: int | None = None) -> None:
        super().__init__(message, path=path)
        self.pid = pid


class LedgerUnwritableError(LedgerError):
    """The ledger cannot be written: disk full, read-only, I/O error. Nothing was changed."""

    retryable: ClassVar[bool] = True


class LedgerNeedsUpgradeError(LedgerError):
    """The ledger has an older schema, and was opened for reading, so it cannot be upgraded."""


class LedgerTooNewError(LedgerError):
    """The ledger was written by a newer drastate."""

    exit_code: ClassVar[int] = 2


class LedgerCorruptError(LedgerError):
    """The file is not a claim ledger, or it is damaged; the text says where."""

    exit_code: ClassVar[int] = 3


# --- where claims come from -----------------------------------------------------------------------


class ClusterError(DrastateError):
    """The source of ResourceClaims (API server or folder) did not give what was asked for."""

    retryable: ClassVar[bool] = True


class ClaimNotFoundError(ClusterError):
    """There is no ResourceClaim of that name."""


class ClusterForbiddenError(ClusterError):
    """The API server refuses the request (401 or 403)."""


class ClusterUnavailableError(ClusterError):
    """The API server cannot be reached, or answers with an error of its own."""


# --- several at once ------------------------------------------------------------------------------


class PodResourcesError(DrastateError):
    """Several failures for one pod, in the order of the pod's claims.

    A single failure is raised as itself; `DrastateError.failures` reads the same either way.

    Attributes:
        pod_uid: the pod.
    """

    _verb: ClassVar[str] = "handle"

    def __init__(self, *, pod: str, pod_uid: str, failures: Sequence[DrastateError]) -> None:
        lines = "".join(f"\n  - {failure.message}" for failure in failures)
        super().__init__(
            f"cannot {self._verb} the resources of pod {pod}, {len(failures)} failures:{lines}\n"
        )
        self.pod = pod
        self.pod_uid = pod_uid
        self._failures = tuple(failures)

    @property
    def failures(self) -> tuple[DrastateError, ...]:
        """Each failure, with its own type and fields."""
        return self._failures


class PrepareError(PodResourcesError):
    """Preparing a pod's claims failed in more than one way."""

    _verb: ClassVar[str] = "prepare"


class UnprepareError(PodResourcesError):
    """Unpreparing a pod's claims failed in more than one way."""

    _verb: ClassVar[str] = "unprepare"


class InternalError(DrastateError):
    """drastate contradicts itself: a bug of ours, please report it with the text."""
