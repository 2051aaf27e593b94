"""Warnings about objects that are read again and again: each is logged once. Bounded memory."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

#: How many warnings are remembered. When it is full everything is forgotten, so that a warning
#: comes back at most once in that many others. Arbitrary; a node has some hundred pods.
_SEEN_MAX = 1024


class WarnOnce:
    """Logs each warning once, however often its object is read.

    Args:
        logger: name of the logger.
    """

    def __init__(self, logger: str) -> None:
        self._log = logging.getLogger(logger)
        self._seen: set[Hashable] = set()
        self._lock = threading.Lock()

    def warn(self, message: str, **facts: str) -> None:
        """Logs a warning, unless the same message came with the same facts before.

        Args:
            message: a constant sentence.
            facts: what it is about; they go into the log record.
        """
        key = (message, *sorted(facts.items()))
        with self._lock:
            if key in self._seen:
                return
            if len(self._seen) >= _SEEN_MAX:
                self._seen.clear()
            self._seen.add(key)
        self._log.warning(message, extra=facts)
