"""What a plugin says of itself, checked before it is believed.

A registration socket can be made by whatever may write to the registry folder, so its answer is
foreign data: it could name any driver and point the node at any socket. Every refusal says
precisely why; the text goes to the plugin. The only I/O is looking at where paths lead.
"""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from drastate.drivers import wire
from drastate.model import DriverName

if TYPE_CHECKING:
    from collections.abc import Collection

#: The only plugin type that is served here. Source: k8s.io/kubelet pkg/apis/pluginregistration/v1,
#: DRAPlugin.
PLUGIN_TYPE = "DRAPlugin"

#: Longest driver name. Source: k8s.io/api resource/v1, DriverNameMaxLength.
DRIVER_NAME_MAX = 63

#: Longest path of a unix socket: sun_path has 108 bytes, the last one is NUL. Source: unix(7).
SOCKET_PATH_MAX_BYTES = 107

#: How much of a foreign text is quoted back. Arbitrary; enough to recognise it.
_QUOTED_MAX = 100

_LABEL = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_DNS_SUBDOMAIN = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")


class RegistrationRefusedError(Exception):
    """A plugin that is not taken; the text is what it is told. Does not leave this room.

    Attributes:
        final: asking the same socket again cannot change it.
        driver: the plugin's driver, None while its name is not known to be good.
    """

    def __init__(self, reason: str, *, final: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.final = final
        self.driver: DriverName | None = None


def check_type(plugin_type: str) -> None:
    """Checks the plugin type.

    Raises:
        RegistrationRefusedError: it is not `PLUGIN_TYPE`; final.

    Source:
        kubelet pluginmanager reconciler: no handler for the type.
    """
    if plugin_type != PLUGIN_TYPE:
        reason = f"plugin type {quote(plugin_type)} is not served here, only {PLUGIN_TYPE} is"
        raise RegistrationRefusedError(reason, final=True)


def check_driver_name(name: str) -> DriverName:
    """Checks a driver's name: a lower-case DNS subdomain of at most `DRIVER_NAME_MAX` characters.

    Raises:
        RegistrationRefusedError: it is something else.

    Source:
        k8s.io/api resource/v1, ResourceSliceSpec.driver; k8s #140837.
    """
    if not name:
        reason = "the driver name is empty"
        raise RegistrationRefusedError(reason)
    if len(name) > DRIVER_NAME_MAX:
        reason = (
            f"the driver name {quote(name)} has {len(name)} characters, more than {DRIVER_NAME_MAX}"
        )
        raise RegistrationRefusedError(reason)
    if _DNS_SUBDOMAIN.fullmatch(name) is None:
        reason = (
            f"the driver name {quote(name)} is not a DNS subdomain: lower-case letters, digits, "
            'dashes and dots, such as "gpu.example.com"'
        )
        raise RegistrationRefusedError(reason)
    return DriverName(name)


def check_endpoint(endpoint: str, root: Path) -> str:
    """Checks where a plugin wants to be called.

    Args:
        endpoint: as the plugin gave it; not empty.
        root: absolute; the endpoint must lie below it, as written and with symbolic links resolved.

    Returns:
        The endpoint without doubled slashes.

    Raises:
        RegistrationRefusedError: relative, too long, with "..", not below the root, or the root
            itself.

    Source:
        k8s #140837; the check of resolved links is ours: a link below the root could lead to any
        socket.
    """
    if "\0" in endpoint:
        reason = f"the endpoint {quote(endpoint)} contains a NUL character"
        raise RegistrationRefusedError(reason)
    if not endpoint.startswith("/"):
        reason = f"the endpoint {quote(endpoint)} is not an absolute path"
        raise RegistrationRefusedError(reason)
    if (size_bytes := len(os.fsencode(endpoint))) > SOCKET_PATH_MAX_BYTES:
        reason = (
            f"the endpoint {quote(endpoint)} has {size_bytes} bytes; a unix socket's path has at "
            f"most {SOCKET_PATH_MAX_BYTES}"
        )
        raise RegistrationRefusedError(reason)
    path = Path("/" + endpoint.lstrip("/"))
    if ".." in path.parts:
        reason = f'the endpoint {quote(endpoint)} contains ".."'
        raise RegistrationRefusedError(reason)
    if path == root:
        reason = f"the endpoint {quote(endpoint)} is the root folder of the plugins itself"
        raise RegistrationRefusedError(reason)
    if not path.is_relative_to(root):
        reason = f"the endpoint {quote(endpoint)} is not inside {root}"
        raise RegistrationRefusedError(reason)
    _check_real_path(endpoint, _resolve(path), root)
    return str(path)


def check_open_endpoint(fd: int, endpoint: str, root: Path) -> None:
    """Checks what an endpoint's path has led to, which may have changed since `check_endpoint`.

    Args:
        fd: the file, opened by that path with `os.O_PATH`.
        endpoint: the path.
        root: as for `check_endpoint`.

    Raises:
        RegistrationRefusedError: no socket, or not below the root.
    """
    if not stat.S_ISSOCK(os.fstat(fd).st_mode):
        reason = f"the endpoint {quote(endpoint)} is not a socket"
        raise RegistrationRefusedError(reason)
    # Of the file itself: the path may have been swapped again.
    _check_real_path(endpoint, Path(f"/proc/self/fd/{fd}").readlink(), root)


def _check_real_path(endpoint: str, resolved: Path, root: Path) -> None:
    resolved_root = _resolve(root)
    if resolved == resolved_root or not resolved.is_relative_to(resolved_root):
        reason = (
            f"the endpoint {quote(endpoint)} leads through a symbolic link to "
            f"{quote(str(resolved))}, which is not inside {resolved_root}"
        )
        raise RegistrationRefusedError(reason)


def check_versions(versions: Collection[str]) -> wire.Api:
    """Picks the service version to call.

    Raises:
        RegistrationRefusedError: none is announced, or none that can be called.
    """
    served = " and ".join(api.version for api in wire.APIS)
    if not versions:
        reason = f"the list of supported versions is empty; {served} can be called"
        raise RegistrationRefusedError(reason)
    api = wire.find_api(versions)
    if api is None:
        named = ", ".join(quote(version) for version in sorted(set(versions))[:10])
        reason = f"none of the supported versions ({named}) can be called, only {served}"
        raise RegistrationRefusedError(reason)
    return api


def quote(text: str) -> str:
    """``text`` for a message or a log line: quoted, shortened, escaped to plain ASCII."""
    return json.dumps(text if len(text) <= _QUOTED_MAX else f"{text[:_QUOTED_MAX]}...")


def _resolve(path: Path) -> Path:
    # realpath, because Path.resolve raises RuntimeError on a loop of links; realpath leaves the
    # loop in place.
    return Path(os.path.realpath(path))
