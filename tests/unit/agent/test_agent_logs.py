"""Log lines: one line each, with the facts beside a constant sentence."""

from __future__ import annotations

import json
import logging

from drastate.agent.logs import JsonFormatter, TextFormatter


def record(**facts: object) -> logging.LogRecord:
    made = logging.makeLogRecord(
        {"name": "drastate.x", "levelname": "WARNING", "msg": "a sentence", "created": 0.5}
    )
    vars(made).update(facts)
    return made


def test_text() -> None:
    """Facts follow the sentence; one with blanks or line breaks is quoted onto the same line."""
    line = TextFormatter().format(record(driver="g", error='two\nlines "q"', count=3))
    assert line == (
        '1970-01-01T00:00:00.500Z WARNING a sentence driver=g error="two\\nlines \\"q\\"" count=3'
    )


def test_json() -> None:
    """Each line is an object that holds time, level, logger, message and the facts."""
    line = JsonFormatter().format(record(driver="g", pods={"a"}))
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "1970-01-01T00:00:00.500Z",
        "level": "WARNING",
        "logger": "drastate.x",
        "message": "a sentence",
        "driver": "g",
        "pods": "{'a'}",
    }
