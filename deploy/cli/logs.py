"""Sets up a process's logs, at its top, and reads lines of them for people."""

from __future__ import annotations

import logging
import re
import shutil
import sys

from ...fabric.host.facts import FactsFormatter, Flood

NOISY = ("rq", "asyncio", "httpx", "uvicorn.access", "matplotlib", "torch", "transformers")
STAMPED = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ([A-Z]+) [\w.]+ (.*)", re.DOTALL)
QUIET = ("DEBUG", "INFO")


def plain_lines(text: str) -> list[str]:
    """Return the lines of a log for people: without mere notes, and without time, level and logger."""
    found = []
    for line in text.splitlines():
        stamped = STAMPED.fullmatch(line)
        if stamped is None or stamped[1] not in QUIET:
            found.append(line if stamped is None else stamped[2])
    return found


def set_up_logs(level: int) -> None:
    """Log to stderr, quietly for libraries that say too much."""
    handler = logging.StreamHandler(sys.stderr)
    width = shutil.get_terminal_size().columns if sys.stderr.isatty() else None
    handler.setFormatter(FactsFormatter("%(asctime)s %(levelname)s %(name)s %(message)s", width))
    handler.addFilter(Flood())
    logging.basicConfig(level=level, handlers=[handler])
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
