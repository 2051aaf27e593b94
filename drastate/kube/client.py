"""ResourceClaims from a Kubernetes API server, through the official client in any version."""

from __future__ import annotations

import json
import re
import socket
import ssl
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NoReturn

import urllib3

from drastate.errors import (
    ClaimNotFoundError,
    ClusterForbiddenError,
    ClusterUnavailableError,
    DrastateError,
    InvalidClaimError,
    UsageError,
)
from drastate.kube.api_client import find_api_client
from drastate.kube.claim import GROUP, parse_claim
from drastate.kube.rest import Answer, Timeouts, get

if TYPE_CHECKING:
    from drastate.model import Claim

#: API versions that can be read, best first. 1.34 serves v1, 1.33 v1beta2, 1.32 v1beta1.
_VERSIONS = ("v1", "v1beta2", "v1beta1")

_GROUP_PATH = f"/apis/{GROUP}"

_LABEL = r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"
_NAMESPACE = re.compile(_LABEL)
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_NAME_MAX = 253

#: How much of the server's own words goes into an error text. Arbitrary.
_WORDS_MAX = 300

_UNAUTHORIZED, _FORBIDDEN, _NOT_FOUND, _TOO_MANY, _SERVER_ERROR = 401, 403, 404, 429, 500
_OK = range(200, 300)


class ClusterClaims:
    """Reads claims from an API server, each time anew. Safe for use by several threads.

    Args:
        api: a ``kubernetes.client.ApiClient``, or an API object that has one, such as CoreV1Api.
        renew: makes a new client when the server answers 401. The client reads most credentials
            once, so a token that is replaced on disk may need this, for example ``lambda:
            kubernetes.config.new_client_from_config()``. None: 401 is an error at once.
        connect_timeout_s: time to connect. A node is near its API server; 3 is long.
        read_timeout_s: time between two pieces of the answer. 10 is long for one object.

    Raises:
        UsageError: ``api`` is no ApiClient and has none.
    """

    def __init__(
        self,
        api: object,
        *,
        renew: Callable[[], object] | None = None,
        connect_timeout_s: float = 3.0,
        read_timeout_s: float = 10.0,
    ) -> None:
        self._api = _need_api_client(api)
        self._renew = renew
        self._timeouts = Timeouts(connect_timeout_s, read_timeout_s)
        # Plain attributes: threads that race for them only ask the server once more.
        self._version: str | None = None

    def get_claim(self, namespace: str, name: str) -> Claim:
        """Reads one claim.

        Raises:
            UsageError: namespace or name is none that Kubernetes allows.
            ClaimNotFoundError: there is no claim of that name.
            ClusterForbiddenError: the server does not know these credentials, or does not let them
                read.
            ClusterUnavailableError: no answer, an error of the server, or an answer that makes no
                sense.
            InvalidClaimError: the claim lacks what every claim has.
        """
        _check_name("namespace", namespace, _NAMESPACE)
        _check_name("claim name", name, _NAME)
        asked = f"ResourceClaim {namespace}/{name}"
        version = self._version or self._discover(asked)
        answer = self._get_object(version, namespace, name)
        if answer.status == _NOT_FOUND and not _is_about(answer, name):
            # Not the claim is missing, but perhaps the API version: an upgrade can take one away.
            self._version = None
            again = self._discover(asked)
            if again != version:
                version = again
                answer = self._get_object(version, namespace, name)
        if answer.status == _NOT_FOUND:
            raise ClaimNotFoundError(
                f"{asked} is not on the API server: it was deleted, or never created"
            )
        if answer.status in (_UNAUTHORIZED, _FORBIDDEN):
            what = f"resourceclaims.{GROUP} in namespace {namespace}"
            role = "with a Role and a RoleBinding"
            raise ClusterForbiddenError(_forbidden(answer, asked, what, role))
        return _read_claim(self._decode(answer, asked), asked, namespace, name)

    def _get_object(self, version: str, namespace: str, name: str) -> Answer:
        path = f"{_GROUP_PATH}/{version}/namespaces/{namespace}/resourceclaims/{name}"
        return self._get(path, f"ResourceClaim {namespace}/{name}")

    def _discover(self, asked: str) -> str:
        """The best version that the server has; remembered."""
        answer = self._get(_GROUP_PATH, asked)
        if answer.status in (_UNAUTHORIZED, _FORBIDDEN):
            role = "with a ClusterRoleBinding to system:discovery"
            raise ClusterForbiddenError(_forbidden(answer, asked, _GROUP_PATH, role))
        served: set[str] = set()
        if answer.status != _NOT_FOUND:
            group = self._decode(answer, asked)
            versions = group.get("versions")
            for each in versions if isinstance(versions, list) else ():
                version = each.get("version") if isinstance(each, Mapping) else None
                if isinstance(version, str):
                    served.add(version)
        for version in _VERSIONS:
            if version in served:
                self._version = version
                return version
        listed = ", ".join(sorted(served)) or "none"
        raise ClusterUnavailableError(
            f"{asked} cannot be read: the API server serves no version of {GROUP} that is known "
            f"here ({', '.join(_VERSIONS)}; it has: {listed}): enable DynamicResourceAllocation "
            "and that API group (on by default from Kubernetes 1.34)"
        )

    def _get(self, path: str, asked: str) -> Answer:
        answer = self._try_get(path, asked)
        if answer.status == _UNAUTHORIZED and self._renew is not None:
            try:
                self._api = _need_api_client(self._renew())
            except DrastateError:
                raise
            except Exception as exc:
                raise ClusterUnavailableError(
                    f"{asked} cannot be read: the API server does not accept the credentials, and "
                    f"new ones could not be had: {_why(exc)}"
                ) from exc
            answer = self._try_get(path, asked)
        return answer

    def _try_get(self, path: str, asked: str) -> Answer:
        try:
            return get(self._api, path, self._timeouts)
        except Exception as exc:
            # The client, urllib3, ssl and plug-ins for credentials have no common root of errors.
            text = (
                f"{asked} cannot be read from the API server: {_why(exc)}; check that it runs and "
                "that this node reaches it"
            )
            if "header value" in str(exc):
                # This error quotes the header, which is the token; the chain must not keep it.
                raise ClusterUnavailableError(
                    f"{asked} cannot be read: the credentials hold a character that HTTP does not "
                    "allow, such as a line break at the end of a token"
                ) from None
            raise ClusterUnavailableError(text) from exc

    def _decode(self, answer: Answer, asked: str) -> Mapping[str, object]:
        if answer.status not in _OK:
            words = _words(answer)
            hint = "the API server is overloaded or in trouble; this passes, or its log says more"
            if answer.status < _SERVER_ERROR and answer.status != _TOO_MANY:
                hint = "check that the configured address is that of an API server"
            raise ClusterUnavailableError(
                f"{asked} cannot be read: HTTP {answer.status}{words}; {hint}"
            )
        try:
            value: object = json.loads(answer.body)
        except (ValueError, RecursionError) as exc:
            _no_sense(asked, "is no JSON", exc)
        if not isinstance(value, dict):
            _no_sense(asked, "is no object", None)
        return value


def _need_api_client(api: object) -> object:
    found = find_api_client(api)
    if found is None:
        raise UsageError(
            "expected a kubernetes.client.ApiClient or an API object that has one, "
            f"not a {type(api).__name__}"
        )
    return found


def _check_name(what: str, name: str, pattern: re.Pattern[str]) -> None:
    if len(name) > _NAME_MAX or pattern.fullmatch(name) is None:
        raise UsageError(
            f"{what} {name[:80]!r} is none that Kubernetes allows: lower-case letters, digits and "
            "dashes"
        )


def _read_claim(raw: Mapping[str, object], asked: str, namespace: str, name: str) -> Claim:
    if raw.get("kind") != "ResourceClaim":
        _no_sense(asked, "is no ResourceClaim", None)
    try:
        claim = parse_claim(raw)
    except InvalidClaimError as exc:
        if exc.claim_uid is None:
            _no_sense(asked, "is no complete ResourceClaim", exc)
        raise
    if (claim.ref.namespace, claim.ref.name) != (namespace, name):
        _no_sense(asked, f"is ResourceClaim {claim.ref}", None)
    return claim


def _no_sense(asked: str, what: str, cause: Exception | None) -> NoReturn:
    raise ClusterUnavailableError(
        f"{asked} cannot be read: the answer {what}; check that the configured address is that of "
        "an API server, with no other proxy in between"
    ) from cause


def _status_object(answer: Answer) -> Mapping[str, object]:
    """The Status object that an API server sends along with an error; empty when there is none."""
    try:
        value: object = json.loads(answer.body)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) and value.get("kind") == "Status" else {}


def _is_about(answer: Answer, name: str) -> bool:
    """Whether the server says that it is the object of this name which is missing."""
    details = _status_object(answer).get("details")
    return isinstance(details, Mapping) and details.get("name") == name


def _words(answer: Answer) -> str:
    message = _status_object(answer).get("message")
    if not isinstance(message, str) or not message:
        return ""
    return f" ({' '.join(message.split())[:_WORDS_MAX]})"


def _forbidden(answer: Answer, asked: str, what: str, role: str) -> str:
    words = _words(answer)
    if answer.status == _UNAUTHORIZED:
        return (
            f"{asked}: the API server does not accept the credentials (HTTP 401) for "
            f'"get" on {what}: the token or certificate is wrong or has expired; renew it'
        )
    return (
        f'{asked}: the API server forbids "get" on {what} (HTTP 403{words}): allow it {role} '
        "for the user that this program runs as"
    )


def _why(exc: BaseException) -> str:
    """Names the innermost reason. Never the error's own text, which can quote a header."""
    seen: list[BaseException] = []
    current: BaseException | None = exc
    while current is not None and current not in seen:
        seen.append(current)
        reason = getattr(current, "reason", None)
        current = reason if isinstance(reason, BaseException) else current.__cause__
        current = current or seen[-1].__context__
    for each in reversed(seen):
        if isinstance(each, ssl.SSLCertVerificationError):
            return f"its certificate is not trusted ({each.verify_message})"
        if isinstance(each, ssl.SSLError):
            return f"TLS failed ({each.reason or 'no reason given'})"
        if isinstance(each, socket.gaierror):
            return f"its name cannot be resolved ({each.strerror})"
        if isinstance(each, (TimeoutError, urllib3.exceptions.TimeoutError)):
            return "no answer in time"
        if isinstance(each, OSError) and each.strerror:
            return each.strerror
    return type(seen[-1]).__name__
