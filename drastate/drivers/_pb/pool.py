"""A descriptor pool of our own.

Message names are global in protobuf's default pool, and a host program may well carry the kubelet's protos too; the
second one to be imported would fail. Ours live in a private pool, so neither side notices the other. Classes made
from a descriptor set also have no check of generator against runtime version, which generated modules have.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory


def _load() -> descriptor_pool.DescriptorPool:
    content = resources.files(__package__).joinpath("descriptors.binpb").read_bytes()
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(content).file:
        pool.AddSerializedFile(file.SerializeToString())
    return pool


_POOL = _load()


def message(full_name: str) -> Any:
    """The class of the message ``full_name``; its type is in the stub of the module that names it.

    Raises:
        KeyError: there is no such message.
    """
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(full_name))
