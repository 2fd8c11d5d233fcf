"""Sends the output of a vLLM to a log, and finds there why it ended.

- All that vLLM's processes write (loggers, warnings, C++) goes to one file, which is only added to. Our own process
  writes where it did: its file descriptors point to the log only while vLLM is imported and its children are started.
- Every start is marked in the file; causes are looked for after the last mark.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from .....fabric.contract.errors import EngineError

MARK = "==== rollfab starts vLLM"
READ_BYTES_MAX = 1 << 20  # from the end
CAUSE_LENGTH_MAX = 400
STREAMS = (1, 2)  # file descriptors of stdout and stderr

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# How a line of vLLM's loggers begins: (EngineCore pid=7) ERROR 11-21 12:25:03 [core.py:1512] …
PREFIX = re.compile(r"^(?:\([^()]*pid=\d+\) ?)?(?:([A-Z]+) \d\d-\d\d [\d:.]+ \[[^\]]*\] ?)?")
EXCEPTION = re.compile(r"^(?:\w+\.)*[A-Z]\w*(?:Error|Exception)(?:: |$)")
CRASH = re.compile(r"^(?:Fatal Python error: |terminate called |Segmentation fault|Bus error)")
# One process says this of another, whose own words are the ones to find.
HEARSAY = re.compile(
    r"see (?:root cause|stack trace)|(?:core|WorkerProc) initialization failed|output_handler failed", re.IGNORECASE
)
VALIDATION = re.compile(r"^(?:[\w.]*ValidationError: )?\d+ validation errors? for \w+\s*")
VALIDATION_ENDS = re.compile(r"\s*\[type=value_error,.*?input_type=\w+\]|\s*For further information visit \S+")


@contextlib.contextmanager
def output_into(path: Path | None) -> Iterator[None]:
    """Log what is written in this block, which starts a vLLM, and what its processes write as long as they live.

    Meanwhile nothing else may run in this process that means to be seen.

    Args:
        path: made with its directory, readable by its owner alone. None: nothing changes.

    Raises:
        EngineError: the file cannot be written.
    """
    if path is None:
        yield
        return
    log = _opened(path)
    saved = [os.dup(stream) for stream in STREAMS]
    _flush()
    try:
        os.write(log, f"{MARK} for process {os.getpid()}\n".encode())
        for stream in STREAMS:
            os.dup2(log, stream)
        yield
    finally:
        _flush()
        for stream, own in zip(STREAMS, saved, strict=True):
            os.dup2(own, stream)
            os.close(own)
        os.close(log)
        _send_loggers(path)


def _opened(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        raise EngineError(f"vLLM's log {path} cannot be written: {error.strerror}; name another file for it") from error


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or there is none
            stream.flush()


def _send_loggers(path: Path) -> None:
    """Have vLLM's loggers of this process write there, too, from now on."""
    for handler in logging.getLogger("vllm").handlers:
        if isinstance(handler, logging.StreamHandler):
            before = handler.setStream(path.open("a"))
            if before is not None and before not in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
                before.close()


# ---------------------------------------------------------------- causes


def cause_of(error: BaseException | None, path: Path | None) -> str:
    """Say in a line what went wrong: the error's own words or, if it only points to another process, that one's.

    "" if that one said nothing, as one that was killed.
    """
    said = ""
    if error is not None:
        said = _shortened(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
    if said and not HEARSAY.search(said):
        return said
    return said if path is None else root_cause(path)


def root_cause(path: Path) -> str:
    """Find the last error in the log since vLLM was started; "" if it tells of none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - READ_BYTES_MAX))
            return find_cause(file.read().decode("utf-8", "replace"))
    except OSError:
        return ""


def find_cause(text: str) -> str:
    """Find the cause in the text of a log, as `root_cause`; exceptions and crashes go before lines marked as errors."""
    lines = [_parts(line) for line in COLOUR.sub("", text.rpartition(MARK)[2]).splitlines()]
    exception = error = ""
    for index, (level, words) in enumerate(lines):
        if level not in ("", "ERROR", "CRITICAL") or HEARSAY.search(words):
            continue
        if EXCEPTION.match(words) or CRASH.match(words):
            exception = " ".join([words, *_rest(lines[index + 1 : index + 5])])
        elif level and words and not words.startswith((" ", "Traceback ")):
            error = words
    return _shortened(exception or error)


def _parts(line: str) -> tuple[str, str]:
    """Split a line into its level, or "" where none is told, and what follows."""
    found = PREFIX.match(line)
    assert found is not None, "all of it is optional"
    return found.group(1) or "", line[found.end() :].rstrip()


def _rest(lines: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield the further lines of an exception's text."""
    for level, words in lines:
        if level or not words or words.startswith(("Traceback ", "[rank", "Process ", "The above", "During handling")):
            return
        yield words.strip()


def _shortened(text: str) -> str:
    """Put a text on one line, without what a validator adds for programs."""
    text = VALIDATION_ENDS.sub("", VALIDATION.sub("", " ".join(text.split()))).strip().removeprefix("Value error, ")
    return text.removesuffix(".") if len(text) <= CAUSE_LENGTH_MAX else text[: CAUSE_LENGTH_MAX - 1] + "…"
