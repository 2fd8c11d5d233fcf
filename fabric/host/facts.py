"""Formats logs: one line per event, its facts after its name.

What goes wrong again and again is not written each time: a row that cannot be read would fill the disk of all who look.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import Any

from ..contract.text import one_line, printable
from .command import with_commands, wrapped

PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "vllm_process_name"}
WINDOW_S = 60.0
REPEAT_S = 30.0  # in which a warning is written once, if all its facts are the same: what is refused, say, at each beat
LINE_COUNT_MAX = 30  # of one warning within a window: enough to see what it is about
EVENT_COUNT_MAX = 1000  # that are counted: names of our own are some hundreds, texts of libraries are without bound


class Flood(logging.Filter):
    """Lets so many lines of each warning pass in a minute, and the same error once in half a minute; the next one says
    how many were left out."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now_s = now_s
        self._windows: dict[tuple[str, object], tuple[float, int]] = {}
        """Logger and event → since when, and how many."""
        self._lines: dict[tuple[str, ...], tuple[float, int]] = {}
        """Logger, event and facts → when it was written last, and how often it was left out since."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether a line is written."""
        if record.levelno < logging.WARNING:
            return True
        now_s = self._now_s()
        return self._is_news(record, now_s) and self._has_room(record, now_s)

    def _is_news(self, record: logging.LogRecord, now_s: float) -> bool:
        facts = {name: value for name, value in vars(record).items() if name not in PLAIN}
        if "error" not in facts or record.exc_info:
            return True
        line = (record.name, str(record.msg), *(f"{name}={_short(value)}" for name, value in facts.items()))
        at_s, count = self._lines.get(line, (-REPEAT_S, 0))
        if now_s - at_s < REPEAT_S:
            self._lines[line] = at_s, count + 1
            return False
        if count:
            record.left_out = count
        if len(self._lines) >= EVENT_COUNT_MAX and line not in self._lines:
            self._lines.clear()
        self._lines[line] = now_s, 0
        return True

    def _has_room(self, record: logging.LogRecord, now_s: float) -> bool:
        event = (record.name, record.msg)
        since_s, count = self._windows.get(event, (now_s, 0))
        if now_s - since_s >= WINDOW_S:
            if count > LINE_COUNT_MAX:
                record.left_out = count - LINE_COUNT_MAX
            since_s, count = now_s, 0
        if len(self._windows) >= EVENT_COUNT_MAX and event not in self._windows:
            self._windows.clear()
        self._windows[event] = since_s, count + 1
        return count < LINE_COUNT_MAX


class FactsFormatter(logging.Formatter):
    """Adds what was given as `extra` to the event's name: `lease.granted worker_id='a' slot_count=8`."""

    def __init__(self, layout: str, width: int | None = None) -> None:
        """width: of the terminal; None: lines are as long as they are."""
        super().__init__(layout)
        self._width = width

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Format a record as one line; tracebacks follow it as always."""
        line = with_commands(one_line(super().formatMessage(record)))
        facts = {name: value for name, value in vars(record).items() if name not in PLAIN}
        line = " ".join([line, *(f"{name}={_short(value)}" for name, value in facts.items())])
        return line if self._width is None else wrapped(line, self._width)

    def formatException(self, ei: Any) -> str:
        """Make a traceback printable: it quotes what users' code raised."""
        return printable(super().formatException(ei))


def _short(value: Any) -> str:
    text = one_line(repr(value))
    return text if len(text) <= 300 else f"{text[:297]}..."


class LastResort(logging.Handler):
    """Writes warnings to stderr in a program that has set up no logging, as Python's own last resort: with their facts,
    which that leaves out. Silent as soon as the program has set some up."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._events = FactsFormatter("%(message)s")
        self._sentences = logging.Formatter("%(message)s")
        self.addFilter(Flood())

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            is_sentence = " " in str(record.msg)
            print((self._sentences if is_sentence else self._events).format(record), file=sys.stderr)


def show_facts() -> None:
    """Have a program of others that sets up no logging see our warnings whole."""
    logger = logging.getLogger(__name__.partition(".")[0])
    if not logger.hasHandlers():
        logger.addHandler(LastResort())
