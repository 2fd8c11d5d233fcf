"""Refuses arguments that no command can take: secrets where others read them, and numbers that are none.

Every user of the machine sees arguments (`ps`), and the shell keeps them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import wraps
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from ...fabric.contract.errors import ConfigError

SECRET = re.compile(
    r"passw(or)?d$|secret$|(^|[_-])api[_-]?key$|^server[_-]key$|^(hf|auth|access|bearer)[_-]token$", re.IGNORECASE
)
WHOLE_BITS = 63  # of a number that counts something
INSTEAD = {"--api-key": "ROLLFAB_SERVER_KEY", "--server-key": "ROLLFAB_SERVER_KEY", "--hf-token": "HF_TOKEN"}


class Secret(NamedTuple):
    """The place of a secret, without its value."""

    option: str
    what: str
    instead: str


def refuse_secrets(arguments: Sequence[str]) -> None:
    """Refuse arguments that hold a password or a key: in a URL, or as the value of an option that is named like one.

    Raises:
        ConfigError: names the option and what to do instead. The text does not repeat the value.
    """
    found = find_secret(arguments)
    if found is not None:
        raise ConfigError(
            f"{found.option} would show {found.what} to every user of this machine (`ps`), and to the shell's history: "
            f"give it {found.instead}, which the user of a process alone can see",
            option=found.option,
        )


def find_secret(arguments: Sequence[str]) -> Secret | None:
    """Find the first secret among arguments."""
    option = ""
    for place, word in enumerate(arguments):
        name, has_value, value = word.partition("=") if word.startswith("--") else ("", "", word)
        option = name or option
        following = value if has_value else "".join(arguments[place + 1 : place + 2])
        if name and SECRET.search(name.removeprefix("--")) and following and not following.startswith("-"):
            return Secret(name, "a secret", f"by the environment, {INSTEAD.get(name, 'or in a file')}")
        if _has_secret(value):
            return Secret(option or "an argument", "the password in a URL", "as ROLLFAB_URL, by the environment")
        option = name if name and not has_value else ""
    return None


def _has_secret(word: str) -> bool:
    """Tell whether a word is, or ends in, a URL with a user's part, or with a setting that is secret."""
    scheme, found, rest = word.partition("://")
    if not found:
        return False
    place, _, query = rest.partition("?")
    # a password in a broker's URL may hold "/", "?" or "#": there the "@" may stand anywhere
    named = rest if re.search(r"(?i)(^|=)rediss?(\+\w+)?$", scheme) else re.split(r"[/?#]", rest, maxsplit=1)[0]
    if "@" in named or (place.startswith("/") and "@" in query):
        return True
    settings = parse_qsl(query, keep_blank_values=True)
    return any(SECRET.search(name) or _has_secret(value) for name, value in settings)


def with_finite_numbers(command: Any) -> Any:
    """Make a command, or a group of them, refuse NaN, infinite and endlessly large numbers; returns it."""
    for each in getattr(command, "commands", {}).values():
        with_finite_numbers(each)
    callback, options = command.callback, {each.name: each.opts[0] for each in command.params}
    if callback is None:
        return command

    @wraps(callback)
    def checked(*words: Any, **given: Any) -> Any:
        for name, value in given.items():
            for each in value if isinstance(value, list | tuple) else (value,):
                _refuse_endless(options.get(name, name), each)
        return callback(*words, **given)

    command.callback = checked
    return command


def _refuse_endless(option: str, value: Any) -> None:
    """Refuse a number that is none.

    Raises:
        ConfigError: it is.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{option} is {value}: give a finite number", option=option)
    if isinstance(value, int) and value.bit_length() > WHOLE_BITS:
        raise ConfigError(f"{option} has more than {WHOLE_BITS} bits: give a smaller number", option=option)
