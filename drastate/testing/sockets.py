"""A gRPC server on a unix socket that can die as if killed: the socket file stays behind."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import grpc

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: Longest path of a unix socket in bytes. Source: unix(7).
SOCKET_PATH_MAX_BYTES = 107


@contextlib.contextmanager
def node_root() -> Iterator[Path]:
    """A temporary folder laid out like the kubelet's, with a path short enough for sockets.

    Holds ``plugins_registry``, ``plugins`` and ``cdi``; removed at the end. (The temporary folders
    of test runners tend to have paths that no socket fits in.)
    """
    with tempfile.TemporaryDirectory(prefix="dra-", dir="/tmp") as folder:
        root = Path(folder)
        for name in ("plugins_registry", "plugins", "cdi"):
            (root / name).mkdir()
        yield root


class SocketServer:
    """A gRPC server whose socket file outlives it, unless it is stopped in order.

    gRPC removes the socket that it made when a server ends. So it makes a hidden one, and the
    public path is a second link to the same file.
    """

    def __init__(self, path: Path, handlers: Sequence[Any], threads: int) -> None:
        """Begins to serve; a socket that lies on ``path`` is replaced, as drivers do.

        Args:
            path: of the socket; its folder exists.
            handlers: gRPC generic handlers.
            threads: how many calls are handled at once.

        Raises:
            ValueError: the path is too long for a socket.
        """
        if (size_bytes := len(os.fsencode(path))) > SOCKET_PATH_MAX_BYTES:
            message = (
                f"{path} has {size_bytes} bytes, a socket's path at most {SOCKET_PATH_MAX_BYTES}"
            )
            raise ValueError(message)
        self._path = path
        hidden = path.with_name(f".{secrets.token_hex(3)}")
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="fake-driver")
        self._server = grpc.server(
            self._pool, options=[("grpc.max_send_message_length", -1), ("grpc.so_reuseport", 0)]
        )
        self._server.add_generic_rpc_handlers(tuple(handlers))
        self._server.add_insecure_port(f"unix:{quote(os.fsencode(hidden))}")
        self._server.start()
        path.unlink(missing_ok=True)
        os.link(hidden, path)

    def stop(self) -> None:
        """Ends in order: the socket file is removed first."""
        self._path.unlink(missing_ok=True)
        self.die()

    def die(self) -> None:
        """Ends at once; whoever connects to the file that stays is refused."""
        self._server.stop(None).wait(5)
        self._pool.shutdown(wait=False)
