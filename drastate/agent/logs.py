"""Log lines for people or for machines: a constant sentence, and the facts beside it."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal

#: What every log record has anyway; all else in it is a fact that the caller added.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def set_up(log_format: Literal["text", "json"], level: str) -> None:
    """Sends our log lines, and warnings of the libraries, to stderr.

    Args:
        log_format: "text" for people, "json" for one object per line.
        level: least level of our own lines.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("drastate").setLevel(level)


def _facts(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


def _time(record: logging.LogRecord) -> str:
    instant = datetime.fromtimestamp(record.created, UTC)
    return instant.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class TextFormatter(logging.Formatter):
    """``time LEVEL message key=value …``, one line however long an error is."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
        facts = "".join(f" {key}={_word(value)}" for key, value in _facts(record).items())
        line = f"{_time(record)} {record.levelname:<7} {record.getMessage()}{facts}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _word(value: object) -> str:
    text = str(value)
    if text and not any(char.isspace() or char in '"=' for char in text):
        return text
    return json.dumps(text, ensure_ascii=False)


class JsonFormatter(logging.Formatter):
    """One JSON object per line: ``time``, ``level``, ``logger``, ``message`` and the facts."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
        entry: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_facts(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str, ensure_ascii=False)
