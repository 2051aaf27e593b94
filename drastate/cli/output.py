"""How commands print: an aligned table for people; JSON and YAML, whose keys are a promise."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from io import RawIOBase
from pathlib import Path

import click

#: Between two columns, as kubectl has it.
_GAP = "   "

#: Stands for "nothing" in a table.
NONE = "-"

_field_names: dict[type, tuple[str, ...]] = {}

_MINUTE = 60
_HOUR = 60 * _MINUTE
_DAY = 24 * _HOUR

#: C0 and C1 controls and DEL: a driver's error text must not steer the terminal or break a line.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}
_CONTROLS |= {ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): "\\t"}


def write(text: str) -> None:
    """Writes a line or more to stdout and flushes: a full disk or a closed pipe shows here."""
    stdout = sys.stdout
    raw = getattr(stdout, "buffer", None)
    if not isinstance(raw, RawIOBase):
        click.echo(text)
        return
    # PYTHONUNBUFFERED, usual in containers: Python itself forgets what a write leaves over, and the
    # end of a list would be missing without an error.
    data = memoryview(f"{text}\n".encode(stdout.encoding, stdout.errors or "strict"))
    while data:
        data = data[raw.write(data) or 0 :]


def note(text: str) -> None:
    """Writes to stderr what is not part of the answer."""
    click.echo(text, err=True)


def warn(text: str) -> None:
    """Writes a warning to stderr."""
    note(f"drastate: warning: {plain(text)}")


def write_data(value: object, output: str) -> None:
    """Writes rows or mappings as JSON or YAML.

    Args:
        value: a row, a mapping or a sequence of such.
        output: "json" or "yaml".
    """
    if output == "json":
        write(_json(value))
        return
    import yaml  # noqa: PLC0415 (costs as much as the ledger)

    # The one in C is ten times as fast, but not every build has it.
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    # By way of JSON, so that both say the same.
    data = json.loads(_json(value))
    text = yaml.dump(data, Dumper=dumper, sort_keys=False, allow_unicode=True, width=1_000)
    write(text.removesuffix("\n"))


def _json(value: object) -> str:
    if isinstance(value, Mapping):
        return json.dumps(value, default=_plain_value, indent=2, ensure_ascii=False)
    if isinstance(value, Sequence):
        # A row a line: good for grep, and an indented one takes five times as long.
        rows = [json.dumps(row, default=_plain_value, ensure_ascii=False) for row in value]
        return "[\n  " + ",\n  ".join(rows) + "\n]" if rows else "[]"
    return _json(to_mapping(value))


def to_mapping(row: object) -> dict[str, object]:
    """A row as a mapping, its keys in the order of the row's fields."""
    kind = type(row)
    names = _field_names.get(kind)
    if names is None:
        if not is_dataclass(row):
            raise TypeError(f"{kind} has no place in an answer")
        names = _field_names[kind] = tuple(field.name for field in fields(row))
    return {name: getattr(row, name) for name in names}


def _plain_value(value: object) -> object:
    if isinstance(value, datetime):
        return instant(value)
    if isinstance(value, Path):
        return str(value)
    return to_mapping(value)


def write_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Writes columns that are as wide as their widest value; the last one is not padded."""
    cleaned = [tuple(map(plain, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(headers, *cleaned, strict=True)]
    widths[-1] = 0
    layout = _GAP.join(f"{{:{width}}}" if width else "{}" for width in widths)
    write("\n".join(layout.format(*row).rstrip() for row in (headers, *cleaned)))


def write_fields(values: Iterable[tuple[str, str]], *, indent: str = "") -> None:
    """Writes "name:  value" lines with the values aligned."""
    lines = [(f"{name}:", plain(value)) for name, value in values]
    width = max((len(name) for name, _ in lines), default=0)
    write("\n".join(f"{indent}{name:{width}}  {value}".rstrip() for name, value in lines))


def plain(text: str) -> str:
    """The text on one line, without control characters."""
    return text if text.isprintable() else text.translate(_CONTROLS)


def shorten(text: str, width: int) -> str:
    """At most ``width`` characters of a text."""
    return text if len(text) <= width else text[: width - 1] + "…"


def joined(values: Sequence[str], most: int = 3) -> str:
    """Values with commas between, the first few of many; "-" for none."""
    if len(values) <= most:
        return ",".join(values) or NONE
    return f"{','.join(values[:most])} + {len(values) - most} more"


def instant(value: datetime) -> str:
    """UTC, ISO 8601, as the ledger has it."""
    return value.astimezone(UTC).isoformat().replace("+00:00", "Z")


def moment(value: datetime | None) -> str:
    """UTC to the second, for tables."""
    return value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if value else NONE


def age(since: datetime, now: datetime) -> str:
    """How long ago, in one or two units, as kubectl says it."""
    seconds = max(0, int((now - since).total_seconds()))
    if seconds < 2 * _MINUTE:
        return f"{seconds}s"
    if seconds < 2 * _HOUR:
        return f"{seconds // _MINUTE}m"
    if seconds < 2 * _DAY:
        return f"{seconds // _HOUR}h"
    return f"{seconds // _DAY}d"
