"""Reads single fields out of raw cluster objects, naming the path of what is not as it should be.

A raw object is what JSON or YAML gives (mappings and lists), or a model object of the cluster
client, which is told by its ``attribute_map`` and ``openapi_types``, so that no client is imported
for it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NoReturn

from drastate.errors import DrastateError

#: Makes the error for one sentence on what is wrong.
Fail = Callable[[str], DrastateError]

_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def is_client_model(value: object) -> bool:
    """Tells whether ``value`` is a model object of a generated cluster client, such as V1Pod."""
    kind = type(value)
    return isinstance(getattr(kind, "attribute_map", None), Mapping) and isinstance(
        getattr(kind, "openapi_types", None), Mapping
    )


def _attribute(model: object, key: str) -> str | None:
    """Finds the attribute of a client model that holds the JSON field ``key``, if there is one."""
    names: Mapping[str, str] = getattr(type(model), "attribute_map", {})
    return next((name for name, json_name in names.items() if json_name == key), None)


@functools.lru_cache(maxsize=256)
def _snake(key: str) -> str:
    return _HUMP.sub("_", key).lower()


def describe(value: object) -> str:  # noqa: PLR0911 (one for each type)
    """Names a raw value for an error text."""
    match value:
        case None:
            return "null"
        case bool():
            return f"the boolean {str(value).lower()}"
        case int() | float():
            return f"the number {value!r:.40}"
        case str():
            return f"text ({value[:40]!r})"
        case list() | tuple():
            return "a list"
        case Mapping():
            return "a mapping"
        case _:
            return f"a {type(value).__name__}"


class Field:
    """One value inside a raw object.

    A value that is null or missing reads as absent, at any depth. What is there but has the wrong
    type raises the error that the reader was made with.

    Args:
        value: the raw value.
        path: how to get there from the object's root, such as ``spec.resourceClaims[0]``; "" is the
            root.
        fail: makes the error.
    """

    __slots__ = ("_fail", "path", "value")

    def __init__(self, value: object, path: str, fail: Fail) -> None:
        self.value = value
        self.path = path
        self._fail = fail

    def fail(self, message: str) -> NoReturn:
        """Raises the error of this object with ``message``."""
        raise self._fail(message)

    def below(self, key: str) -> str:
        """The path of the member ``key``."""
        return f"{self.path}.{key}" if self.path else key

    def member(self, key: str) -> Field:
        """The member ``key``, by its JSON name; its value is None when absent.

        Raises:
            DrastateError: this value has no members, or they have the names of another language
                (snake_case).
        """
        return Field(self._raw(key), self.below(key), self._fail)

    def has_member(self, key: str) -> bool:
        """Whether the member is there, even as null; whether a client model has such a field."""
        if isinstance(self.value, Mapping):
            return key in self.value
        return is_client_model(self.value) and _attribute(self.value, key) is not None

    def _raw(self, key: str) -> object:
        value = self.value
        if value is None:
            return None
        if isinstance(value, Mapping):
            found: object = value.get(key)
            if found is None and key not in value and _snake(key) != key and _snake(key) in value:
                self.fail(
                    f"field {self.below(_snake(key))} should be {self.below(key)}: this looks "
                    "like what to_dict() of a kubernetes model object gives; pass the object "
                    "itself, or its JSON"
                )
            return found
        if is_client_model(value):
            name = _attribute(value, key)
            return None if name is None else getattr(value, name, None)
        return self.fail(f"{self.path or 'it'} must be a mapping, not {describe(value)}")

    def members(self, key: str) -> Mapping[object, object]:
        """The member ``key``, a mapping with free names; empty when absent."""
        value = self._raw(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            self.fail(f"{self.below(key)} must be a mapping, not {describe(value)}")
        return value

    def items(self, key: str) -> Iterator[Field]:
        """The entries of the list ``key``; none when absent."""
        value = self._raw(key)
        if value is None:
            return
        if not isinstance(value, (list, tuple)):
            self.fail(f"{self.below(key)} must be a list, not {describe(value)}")
        for index, item in enumerate(value):
            yield Field(item, f"{self.below(key)}[{index}]", self._fail)

    def as_text(self) -> str | None:
        """This value as text; None when absent.

        Raises:
            DrastateError: it is no text, or holds a character that no name and no UID can hold.
        """
        value = self.value
        if value is None:
            return None
        if not isinstance(value, str):
            quote = "" if isinstance(value, (Mapping, list, tuple)) else ": put it in quotes"
            self.fail(f"{self.path} must be text, not {describe(value)}{quote}")
        # Control characters would spoil logs, and lone surrogates could not be stored.
        if not value.isprintable():
            self.fail(f"{self.path} holds a character that cannot be printed: {value[:80]!r}")
        return value

    def text(self, key: str) -> str | None:
        """The member ``key`` as text; None when absent."""
        return self.member(key).as_text()

    def need(self, key: str) -> str:
        """The member ``key`` as text, which must be there and not be empty."""
        value = self.text(key)
        if not value:
            self.fail(f"{self.below(key)} is missing")
        return value

    def flag(self, key: str) -> bool:
        """The member ``key`` as a boolean; False when absent."""
        value = self._raw(key)
        if value is None:
            return False
        if not isinstance(value, bool):
            self.fail(f"{self.below(key)} must be true or false, not {describe(value)}")
        return value
