"""Makes text from elsewhere fit to be shown: nothing in it may move a cursor, hide what follows, or turn a line around.

- Code that takes text from users' code into a record cleans it there; code that prints a record cleans it again, since
  it may be an older record, or another writer's.
"""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

NAMES_SHOWN = 8
# C0 and C1 controls but tab and line feed, DEL; marks that change the direction of text; line and paragraph separators;
# lone surrogates, which UTF-8 has no bytes for.
HARMFUL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")

SHOWN_MAX = 80  # characters of a value that is refused
# What pydantic expects, by its kind of error or the first word of that, with the bounds that it names.
EXPECTED: Mapping[str, str] = {
    "greater_than": "more than {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than": "less than {lt}",
    "less_than_equal": "{le} or less",
    "literal_error": "{expected}",
    "string_pattern_mismatch": "text that matches {pattern}",
    "string_too_long": "{max_length} or fewer characters",
    "string_too_short": "{min_length} or more characters",
    "too_long": "{max_length} or fewer items",
    "too_short": "{min_length} or more items",
    "bool": "true or false",
    "dict": "an object",
    "finite": "a finite number",
    "float": "a number",
    "int": "a whole number",
    "list": "a list",
    "model": "an object",
    "string": "text",
}

DAMAGED = "The file is damaged, cut off or of another format: copy, download or write it again"  # the next step


def printable(text: str) -> str:
    """Make text that any terminal and any record can take: harmful characters become their escapes, such as \\x1b."""
    text = text.replace("\r\n", "\n")
    return HARMFUL.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """Make such text of a single line."""
    return printable(text).replace("\n", "\\n").replace("\t", " ")


def cleaned(value: Any) -> Any:
    """Make every text in plain values (dicts, lists, texts, numbers) printable, for tables."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {cleaned(name): cleaned(each) for name, each in value.items()}
    return [cleaned(each) for each in value] if isinstance(value, list | tuple) else value


def counted(count: int, noun: str, *does: str) -> str:
    """Write a count with its noun and verb: "1 group waits" or "2 groups wait", of ("waits", "wait")."""
    many = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return " ".join([f"{count:,}", noun if count == 1 else many, *does[count != 1 :][:1]])


def shown(value: Any) -> str:
    """Show a value as it stands in a refusal, cut: it may be of any size, or refuse to be shown."""
    brief = reprlib.Repr()
    brief.maxstring = brief.maxother = SHOWN_MAX
    try:
        text = brief.repr(value)
    except Exception:  # noqa: BLE001 - repr() is foreign code; the caller's message goes on with the type
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}…"


def told(value: Any, show: Callable[[Any], str] = shown) -> str:
    """Write a value as who typed it would, where that may have been in a file, in JSON or at a prompt."""
    if value is None or isinstance(value, bool):
        return {None: "nothing", True: "true", False: "false"}[value]
    return str(value) if hasattr(value, "isoformat") else show(value)  # a time of TOML


def validated(error: Mapping[str, Any]) -> str:
    """Say in our words why pydantic refuses a value. error: one of ValidationError.errors()."""
    kind = error["type"]
    if kind == "missing":
        return "it is missing"
    expected = EXPECTED.get(kind) or EXPECTED.get(kind.partition("_")[0])
    if expected is None:
        return str(error["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")
    given = told(error["input"])
    if kind.startswith(("greater", "less")):
        given = given.strip("'")  # of a number in a text
    return f"it is {given}, expected {expected.format(**error.get('ctx', {}))}"


def did_you_mean(given: str, known: Iterable[str], then: str = "") -> str:
    """Write the end of a refusal: the known names nearest to `given`, or else those there are. then: what to do."""
    end = f". {then}" if then else ""
    names = sorted(set(known))
    folded = [each.casefold() for each in names]
    close = difflib.get_close_matches(given[:200].casefold(), dict.fromkeys(folded), n=3, cutoff=0.6)
    near = [name for each in close for name, found in zip(names, folded, strict=True) if found == each]
    if near:
        return f"did you mean {' or '.join(near[:3])}?{end[1:]}"
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return (f"there are {', '.join(names[:NAMES_SHOWN])}{more}" if names else "there are none") + end
