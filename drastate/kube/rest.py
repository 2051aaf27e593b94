"""One GET through an ApiClient of whatever version of the kubernetes client, as bytes.

The client's own models are not used: they drop fields that are newer than the client, and raise
over values that are newer. Its retries are not used either: they obey a Retry-After of hours.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import urllib3

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

#: Largest answer that is read. etcd takes objects up to about 1.5 MiB.
_BODY_MAX_BYTES = 16 * 1024 * 1024

_CHUNK_BYTES = 64 * 1024

#: The name of the only authentication setting in the client's generated code.
_AUTH = ["BearerToken"]

_HEADERS: Mapping[str, str] = {"Accept": "application/json"}


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer, of any status."""

    status: int
    body: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Timeouts:
    """How long one attempt may take; a connection that breaks is tried once more.

    Attributes:
        connect_s: to connect.
        read_s: between two pieces of the answer.
    """

    connect_s: float
    read_s: float


def get(api: Any, path: str, timeouts: Timeouts) -> Answer:
    """Sends GET ``path`` to the API server that ``api`` is configured for, with its credentials.

    Args:
        api: an ApiClient.
        path: absolute, made of safe characters only.
        timeouts: limits.

    Returns:
        The answer, whatever its status.

    Raises:
        Exception: whatever the client, urllib3, or the credentials' plug-in raises.
    """
    pool = getattr(getattr(api, "rest_client", None), "pool_manager", None)
    if pool is None:
        return _get_by_call(api, path, timeouts)
    url, headers = _address(api, path)
    retries = urllib3.Retry(
        total=1,
        status=0,
        redirect=False,
        raise_on_redirect=False,
        raise_on_status=False,
        respect_retry_after_header=False,
    )
    response = pool.request(
        "GET",
        url,
        headers=headers,
        timeout=urllib3.Timeout(connect=timeouts.connect_s, read=timeouts.read_s),
        retries=retries,
        redirect=False,
        preload_content=False,
    )
    try:
        body = bytearray()
        for chunk in response.stream(_CHUNK_BYTES, decode_content=True):
            body += chunk
            if len(body) > _BODY_MAX_BYTES:
                response.close()  # the rest of it would be taken for the next answer
                message = f"answer larger than {_BODY_MAX_BYTES // 1024 // 1024} MiB"
                raise ValueError(message)
        return Answer(int(response.status), bytes(body))
    finally:
        response.release_conn()


def _address(api: Any, path: str) -> tuple[str, dict[str, str]]:
    """URL and headers with credentials, as the client itself would send them."""
    serialize = getattr(api, "param_serialize", None)
    if serialize is not None:  # kubernetes 37 and later
        _, url, headers, *_ = serialize(
            method="GET",
            resource_path=path,
            query_params=[],
            header_params=dict(_HEADERS),
            auth_settings=_AUTH,
        )
        return url, headers
    headers = {**getattr(api, "default_headers", {}), **_HEADERS}
    cookie = getattr(api, "cookie", None)
    if cookie:
        headers["Cookie"] = cookie
    api.update_params_for_auth(headers, [], _AUTH)
    return f"{api.configuration.host}{path}", headers


def _get_by_call(api: Any, path: str, timeouts: Timeouts) -> Answer:
    """The same through the public call alone, for an ApiClient that is built in another way."""
    limits = (timeouts.connect_s, timeouts.read_s)
    try:
        serialize = getattr(api, "param_serialize", None)
        if serialize is not None:
            request = serialize(
                method="GET",
                resource_path=path,
                query_params=[],
                header_params=dict(_HEADERS),
                auth_settings=_AUTH,
            )
            response = api.call_api(*request, _request_timeout=limits)
        else:
            response = api.call_api(
                path,
                "GET",
                query_params=[],
                header_params=dict(_HEADERS),
                auth_settings=_AUTH,
                _return_http_data_only=True,
                _preload_content=False,
                _request_timeout=limits,
            )
    except Exception as exc:
        # Older clients raise for every status but success, with the status and the body in the
        # error.
        status, body = getattr(exc, "status", None), getattr(exc, "body", None)
        if not isinstance(status, int) or not status:
            raise
        return Answer(status, _as_bytes(body))
    read = getattr(response, "read", None)
    body = read() if callable(read) else None
    return Answer(int(response.status), _as_bytes(body or getattr(response, "data", None)))


def _as_bytes(body: object) -> bytes:
    if isinstance(body, str):
        return body.encode(errors="replace")
    return bytes(body) if isinstance(body, (bytes, bytearray)) else b""
