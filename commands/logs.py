"""How logs look: one line per event, its facts after its name. Installed once, at the top of a process."""

from __future__ import annotations

import logging
import sys
from typing import Any

from ..fabric.text import one_line, printable

PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "vllm_process_name"}
NOISY = ("rq", "asyncio", "httpx", "uvicorn.access", "matplotlib", "transformers")


class FactsFormatter(logging.Formatter):
    """Adds what was given as `extra` to the event's name: `lease.granted worker_id='a' slot_count=8`."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """One line; tracebacks follow it as always."""
        line = one_line(super().formatMessage(record))
        facts = {name: value for name, value in vars(record).items() if name not in PLAIN}
        return " ".join([line, *(f"{name}={_short(value)}" for name, value in facts.items())])

    def formatException(self, ei: Any) -> str:
        """A traceback quotes what users' code raised."""
        return printable(super().formatException(ei))


def _short(value: Any) -> str:
    text = one_line(repr(value))
    return text if len(text) <= 300 else f"{text[:297]}..."


def set_up_logs(level: int) -> None:
    """Log to stderr, quietly for libraries that say too much."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(FactsFormatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
