"""Reading an open ledger: short transactions, and values that may not be what they should be."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from sqlalchemy.engine import Connection
from sqlalchemy.exc import OperationalError

from drastate.ledger.engine import raw_connection
from drastate.ledger.evidence import reading
from drastate.ledger.views import Problem

#: What `to_instant` and its like raise for a stored value that cannot be read.
UNREADABLE = (ValueError, TypeError)

_decode_json = json.JSONDecoder().raw_decode


class Query:
    """A connection to read from, and what could not be read through it.

    Attributes:
        connection: read-only.
        path: the database file, for texts.
    """

    def __init__(self, connection: Connection, path: Path) -> None:
        """Reads through ``connection``, which somebody else closes."""
        self.connection = connection
        self.path = path
        self._problems: dict[Problem, None] = {}

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What could not be read so far."""
        return tuple(self._problems)

    def note(self, subject: str, error: object) -> None:
        """Remembers a value that cannot be read, so that the others can be given all the same."""
        self._problems[Problem(subject, str(error))] = None

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """What is read in the block belongs together.

        Raises:
            LedgerError: as `reading`.
        """
        with reading(self.path):
            try:
                yield
            finally:
                # A reader that stays in its transaction keeps the -wal from shrinking.
                self.connection.rollback()

    def rows(self, sql: str, parameters: Mapping[str, Any] | None = None) -> Sequence[Any]:
        """All rows of a statement; call it in a `transaction`."""
        values = dict(parameters or {})
        try:
            return self.connection.exec_driver_sql(sql, values).fetchall()
        except OperationalError as error:
            if "decode" not in str(error.orig):
                raise
        # One text that is not UTF-8 would hide every row.
        self.note("ledger", "there is text that is not UTF-8, shown with \N{REPLACEMENT CHARACTER}")
        raw_connection(self.connection).text_factory = _decode_what_can_be
        return self.connection.exec_driver_sql(sql, values).fetchall()


def _decode_what_can_be(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def to_instant(text: str) -> datetime:
    """A stored instant.

    Raises:
        ValueError: not an instant, or one without a time zone.
        TypeError: not even text.
    """
    instant = datetime.fromisoformat(text)
    if instant.tzinfo is None:
        raise ValueError(f"instant {text!r} has no time zone")
    return instant


def to_instant_or_none(text: str | None) -> datetime | None:
    """A stored instant, or None where none is stored."""
    return None if text is None else to_instant(text)


def to_strings(text: str) -> tuple[str, ...]:
    """A stored list of strings.

    Raises:
        ValueError: not JSON, or something else in JSON.
        TypeError: not even text.
    """
    if text == "[]":
        return ()
    # A third of the time of json.loads, which counts with ten thousand claims.
    values, end = _decode_json(text)
    if end != len(text) or type(values) is not list:
        raise ValueError(f"{text!r} is not a list of strings")
    for value in values:
        if type(value) is not str:
            raise ValueError(f"{text!r} is not a list of strings")
    return tuple(values)
