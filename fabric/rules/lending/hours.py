"""Hours of the week, as a serving team writes them: "mon-fri 22:00-06:00".

- Hours are UTC. A window over midnight belongs to the day on which it begins.
- Days without times are whole days, times without days are every day's; no window at all is always.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...contract.errors import InputError

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
DAY_MINUTES = 24 * 60
WEEK_MINUTES = 7 * DAY_MINUTES
LENGTH_MAX = 100  # of a text
EPOCH_DAY = 3  # 1 January 1970 was a Thursday
HOURS_ADVICE = 'write "22:00-06:00", "sat,sun" or "mon-fri 22:00-06:00" (UTC)'

Window = tuple[int, int]  # minutes of the week [start, end); an end beyond the week is in the next one


def minute_of_week(wall_ms: int) -> int:
    """Compute the minute of the week of a time in ms since 1970, UTC; 0 is Monday, 00:00."""
    return (wall_ms // 60_000 + EPOCH_DAY * DAY_MINUTES) % WEEK_MINUTES


def parse_hours(text: str) -> list[Window]:
    """Read windows of the week from a text with days, times, or both: "mon-fri 22:00-06:00".

    Raises:
        InputError: names the text, what is wrong with it, and what to write.
    """
    if len(text) > LENGTH_MAX:
        raise InputError(f"hours {text[:20]!r}… have {len(text)} characters, at most {LENGTH_MAX}: {HOURS_ADVICE}")
    words = text.lower().split()
    if not 1 <= len(words) <= 2 or (len(words) == 2 and ":" in words[0]):
        raise InputError(f"hours {text!r}: expected days, times, or days and times: {HOURS_ADVICE}")
    days_word = words[0] if ":" not in words[0] else "mon-sun"
    times_word = words[-1] if ":" in words[-1] or len(words) == 2 else "00:00-24:00"
    start, end = _times(times_word, text)
    length = end - start if end > start else end - start + DAY_MINUTES
    return [(day * DAY_MINUTES + start, day * DAY_MINUTES + start + length) for day in _days(days_word, text)]


def is_within(hours: Sequence[str], minute_of_week: int) -> bool:
    """Tell whether a minute of the week is in one of these windows; True if there is no window."""
    windows = [window for text in hours for window in parse_hours(text)]
    return not windows or any((minute_of_week - start) % WEEK_MINUTES < end - start for start, end in windows)


def _days(word: str, text: str) -> list[int]:
    found: list[int] = []
    for part in word.split(","):
        first, dash, last = part.partition("-")
        for name in (first, last if dash else first):
            if name not in DAYS:
                raise InputError(f"hours {text!r}: {name!r} is no day, days are {' '.join(DAYS)}: {HOURS_ADVICE}")
        begin = DAYS.index(first)
        count = (DAYS.index(last) - begin) % 7 + 1 if dash else 1
        found += [(begin + offset) % 7 for offset in range(count)]
    return list(dict.fromkeys(found))


def _times(word: str, text: str) -> tuple[int, int]:
    first, _, last = word.partition("-")
    start, end = _minute(first, text), _minute(last, text)
    if start in (end, DAY_MINUTES):
        raise InputError(f"hours {text!r}: {word!r} is empty; the whole day is 00:00-24:00, or only its name")
    return start, end


def _minute(word: str, text: str) -> int:
    hour, _, minute = word.partition(":")
    is_number = all(part.isascii() and part.isdigit() and len(part) <= 2 for part in (hour, minute))
    if not is_number or int(minute) > 59 or int(hour) * 60 + int(minute) > DAY_MINUTES:
        raise InputError(f"hours {text!r}: {word!r} is no time from 00:00 to 24:00: {HOURS_ADVICE}")
    return int(hour) * 60 + int(minute)
