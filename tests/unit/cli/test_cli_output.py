"""Tables, ages and plain values."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click
import pytest

from drastate.cli import output
from drastate.cli.options import Instant
from drastate.clock import SystemClock
from drastate.ledger.check import Finding, Severity

Capture = pytest.CaptureFixture[str]
NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


def test_a_table_is_as_wide_as_its_widest_value(capsys: Capture) -> None:
    """Columns are aligned with three blanks between, and the last one is not padded."""
    output.write_table(("A", "LONG HEADER", "C"), [("wide value", "b", "c"), ("a", "b", "")])
    assert capsys.readouterr().out == (
        "A            LONG HEADER   C\nwide value   b             c\na            b\n"
    )


def test_fields_are_aligned(capsys: Capture) -> None:
    """Names end in a colon, values stand below one another."""
    output.write_fields([("Name", "x"), ("Longer name", "y"), ("Empty", "")], indent="  ")
    assert capsys.readouterr().out == "  Name:         x\n  Longer name:  y\n  Empty:\n"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("naïve \N{SNOWMAN}", "naïve \N{SNOWMAN}"),
        ("a\nb\tc\rd", "a\\nb\\tc\\rd"),
        ("\x1b[31m\x00\x7f\x9b", "\\x1b[31m\\x00\\x7f\\x9b"),
    ],
)
def test_control_characters_are_shown_and_not_sent(text: str, shown: str) -> None:
    """What could steer a terminal or break a line is escaped; the rest stays."""
    assert output.plain(text) == shown


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "0s"),
        (0, "0s"),
        (119, "119s"),
        (120, "2m"),
        (7199, "119m"),
        (7200, "2h"),
        (172_799, "47h"),
        (172_800, "2d"),
        (86_400 * 400, "400d"),
    ],
)
def test_ages_are_short(seconds: int, text: str) -> None:
    """One number and a unit; a clock that went back gives zero."""
    assert output.age(NOW - timedelta(seconds=seconds), NOW) == text


def test_many_values_are_cut_and_counted() -> None:
    """The first three, and how many more."""
    assert output.joined([]) == "-"
    assert output.joined(["a", "b", "c"]) == "a,b,c"
    assert output.joined(["a", "b", "c", "d", "e"]) == "a,b,c + 2 more"
    assert output.shorten("abcdef", 4) == "abc…"
    assert output.shorten("abcd", 4) == "abcd"


def test_rows_become_plain_values(capsys: Capture) -> None:
    """Rows, instants, paths, tuples and enums are written as JSON has them, a row a line."""
    rows = [Finding(Severity.INFO, "subject", "text \N{SNOWMAN}")]
    output.write_data(rows, "json")
    text = capsys.readouterr().out
    assert text == (
        '[\n  {"severity": "info", "subject": "subject", "text": "text \N{SNOWMAN}",'
        ' "remedy": ""}\n]\n'
    )
    output.write_data({"at": NOW, "path": Path("/x"), "rows": tuple(rows)}, "json")
    found = json.loads(capsys.readouterr().out)
    assert found["at"] == "2026-03-01T12:00:00Z"
    assert found["path"] == "/x"
    assert found["rows"][0]["severity"] == "info"
    output.write_data(rows[0], "json")
    assert json.loads(capsys.readouterr().out)["subject"] == "subject"


def test_what_has_no_place_in_an_answer_is_our_mistake() -> None:
    """An object of another kind is a TypeError and not its repr."""
    with pytest.raises(TypeError, match="no place in an answer"):
        output.write_data({"x": object()}, "json")


@pytest.mark.parametrize(
    ("text", "duration"),
    [
        ("15m", timedelta(minutes=15)),
        ("2h", timedelta(hours=2)),
        ("3d", timedelta(days=3)),
        ("1h30m", timedelta(minutes=90)),
        ("1w", timedelta(days=7)),
        ("45s", timedelta(seconds=45)),
    ],
)
def test_durations_count_back(
    text: str, duration: timedelta, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A duration means so long before now."""
    monkeypatch.setattr(SystemClock, "now", lambda _: NOW)
    assert Instant().convert(text, None, None) == NOW - duration


@pytest.mark.parametrize(
    ("text", "instant"),
    [
        ("2026-03-01", datetime(2026, 3, 1, tzinfo=UTC)),
        ("2026-03-01T03:12", datetime(2026, 3, 1, 3, 12, tzinfo=UTC)),
        ("2026-03-01T03:12:00Z", datetime(2026, 3, 1, 3, 12, tzinfo=UTC)),
        ("2026-03-01T05:12:00+02:00", datetime(2026, 3, 1, 3, 12, tzinfo=UTC)),
    ],
)
def test_instants_are_utc_unless_they_say_else(text: str, instant: datetime) -> None:
    """ISO 8601, with or without a zone."""
    assert Instant().convert(text, None, None) == instant


@pytest.mark.parametrize("text", ["", "yesterday", "15", "m15", "-2h", "9" * 30 + "d", "2h ago"])
def test_what_is_no_time_is_refused(text: str) -> None:
    """Neither a duration nor an instant: the text shows examples."""
    with pytest.raises(click.BadParameter, match="such as 15m"):
        Instant().convert(text, None, None)
