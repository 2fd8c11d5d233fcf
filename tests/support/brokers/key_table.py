"""The table in the docstring of fabric/queue/keys.py, as something that keys can be held against."""

from __future__ import annotations

import re
from collections.abc import Iterable

from redis import Redis

from rollfab.fabric.queue import keys as module

ROW = re.compile(r"^  (rf:\S+)\s+(HASH|ZSET|STREAM|STRING|LIST)\s", re.MULTILINE)
PARTS = (
    (r"\{rf\}", r"\{rf\}"),
    (r"\{run\.s\}", r"\{[A-Za-z0-9_-]+\.\d+\}"),
    (r"\{run\.w\}", r"\{[A-Za-z0-9_-]+\.w\}"),
    (":K:", ":(?:trajectory|turn):"),
)


def names_and_kinds() -> list[tuple[str, str]]:
    """A key of each row, by run "r1" and the name "x" where there are many, and its type."""
    assert module.__doc__ is not None
    found = []
    for name, kind in ROW.findall(module.__doc__):
        key = re.sub(r"<[^>]+>", "x", name.replace("{run.s}", "{r1.0}").replace("{run.w}", "{r1.w}"))
        jobs = ("trajectory", "turn") if ":K:" in key else ("",)
        found += [(key.replace(":K:", f":{job}:"), kind.lower()) for job in jobs]
    return found


def rows() -> list[tuple[re.Pattern[str], str]]:
    """Each row's keys as a pattern, and their type."""
    assert module.__doc__ is not None
    found = []
    for name, kind in ROW.findall(module.__doc__):
        pattern = re.escape(name)
        for word, meaning in PARTS:
            pattern = pattern.replace(re.escape(word.replace("\\", "")), meaning)
        found.append((re.compile(re.sub(r"<[^>]+>", "[^:{}]+", pattern) + r"\Z"), kind.lower()))
    return found


def unaccounted(redis: Redis) -> list[str]:
    """Keys of the broker that no row of the table, or more than one, speaks of, or that are of another type."""
    table = rows()
    wrong = []
    for key in _text(redis.scan_iter(count=1000)):
        kinds = [kind for pattern, kind in table if pattern.match(key)]
        is_kind = redis.type(key).decode()  # type: ignore[union-attr]
        if key.startswith("rq:") or is_kind == "none":  # rq's own; expired a moment ago
            continue
        if kinds != [is_kind]:
            wrong.append(f"{key} ({is_kind}): the table says {kinds or 'nothing'}")
    return wrong


def _text(keys: Iterable[bytes]) -> list[str]:
    return [key.decode() for key in keys]
