"""Recognises the official cluster client without loading it."""

from __future__ import annotations

import inspect
from typing import cast

from drastate.errors import UsageError


def find_api_client(obj: object) -> object | None:
    """Finds the ApiClient in ``obj``, which is one or has one.

    Args:
        obj: an ApiClient, or an API object such as CoreV1Api, or a DynamicClient.

    Returns:
        The ApiClient; None when there is none.

    Raises:
        UsageError: it is a client for asyncio; drastate calls from threads.
    """
    for candidate in (obj, getattr(obj, "api_client", None), getattr(obj, "client", None)):
        call = getattr(candidate, "call_api", None)
        if not callable(call) or inspect.isclass(candidate):
            continue
        if inspect.iscoroutinefunction(call):
            raise UsageError(
                "this API client is made for asyncio; pass one of the kubernetes package "
                "(kubernetes.client.ApiClient)"
            )
        return cast("object", candidate)
    return None
