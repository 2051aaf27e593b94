"""The versions of the DRAPlugin service and their messages. No I/O here.

Both versions have the same calls; v1 only adds a device's share ID. What a plugin announces
("v1.DRAPlugin") is not the name on the wire ("k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, cast

from drastate.drivers._pb import dra_v1, dra_v1beta1

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from types import ModuleType

    from google.protobuf.message import Message

    from drastate.model import ClaimRef, Operation

PrepareResponse: TypeAlias = (
    dra_v1.NodePrepareResourcesResponse | dra_v1beta1.NodePrepareResourcesResponse
)
UnprepareResponse: TypeAlias = (
    dra_v1.NodeUnprepareResourcesResponse | dra_v1beta1.NodeUnprepareResourcesResponse
)


@dataclass(frozen=True, slots=True)
class Api:
    """One version of the DRAPlugin service.

    Attributes:
        version: what plugins announce.
        package: proto package, the first part of the name on the wire.
        messages: the module with its message classes.
    """

    version: str
    package: str
    messages: ModuleType

    def path(self, operation: Operation) -> str:
        """The wire name of ``operation``, as in a gRPC ``:path`` header."""
        return f"/{self.package}.DRAPlugin/{operation}"

    def request(self, operation: Operation, claims: Sequence[ClaimRef]) -> Message:
        """The request message that names ``claims``."""
        request = getattr(self.messages, f"{operation}Request")
        claim = self.messages.Claim
        return cast(
            "Message",
            request(claims=[claim(namespace=c.namespace, uid=c.uid, name=c.name) for c in claims]),
        )

    def response_class(self, operation: Operation) -> type[Message]:
        """The class of the answer to ``operation``."""
        return cast("type[Message]", getattr(self.messages, f"{operation}Response"))


#: What can be called, the preferred one first. Source: k8s.io/kubelet v0.36,
#: pkg/apis/dra/{v1,v1beta1}; ours: the newest wins whatever the plugin's own order, so that the
#: order in which a driver lists its versions does not decide whether share IDs are known.
APIS = (
    Api("v1.DRAPlugin", "k8s.io.kubelet.pkg.apis.dra.v1", dra_v1),
    Api("v1beta1.DRAPlugin", "k8s.io.kubelet.pkg.apis.dra.v1beta1", dra_v1beta1),
)


def find_api(versions: Collection[str]) -> Api | None:
    """The best version among those that a plugin announces.

    Args:
        versions: may hold duplicates and names unknown here (health services, versions to come).

    Returns:
        None when nothing can be called. Plain numbers ("1.0.0") and v1alpha versions are among what
        cannot: one name stood for different messages in the past, so a guess could misread an
        answer.
    """
    return next((api for api in APIS if api.version in versions), None)


def serialize(message: Message) -> bytes:
    """The bytes of ``message``; for gRPC, which wants a function."""
    return message.SerializeToString()
