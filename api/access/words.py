"""Next steps in HTTP's words: errors of the library tell them as Python's calls and keywords, or as commands.

What only whoever runs the fabric can do, such as to start a worker, stays a command in backticks.
"""

from __future__ import annotations

import json
import re
from ast import literal_eval
from collections.abc import Iterable, Mapping

from ...fabric.host.command import plain_commands

JSON_WORDS = {"None": "null", "True": "true", "False": "false"}
BARE = re.compile(r"(?<!\w)'[^']*'|\"[^\"]*\"|`[^`]*`|(?<![\w=])(?:None|True|False)\b")  # not what is quoted
VALUE = r"'[^'`]*'|\"[^\"`]*\"|True|False|None|\d+|…"


class Words:
    """What one HTTP face says for them.

    phrases: by what matches them, as a regular expression; "{run}" of the words is the run's path. fields: by keyword,
    the field of a request that says the same.
    """

    def __init__(self, phrases: Mapping[str, str], fields: Mapping[str, str]) -> None:
        self.phrases = dict(phrases)
        self._phrases = [(re.compile(found), words) for found, words in phrases.items()]
        names = "|".join(sorted(fields, key=len, reverse=True))
        self._keyword = re.compile(rf"\b({names})=({VALUE})")
        self._fields = dict(fields)

    def say(self, text: str, run_id: str = "") -> str:
        """Return a message as a client of this face can follow it. run_id: which run its request is about."""
        text = plain_commands(text)
        for found, words in self._phrases:
            told = words.replace("{run}", f"/v1/runs/{run_id or 'RUN'}")
            text = found.sub(lambda _, told=told: told, text)  # type: ignore[misc]
        text = self._keyword.sub(self._field, text)
        return BARE.sub(lambda found: JSON_WORDS.get(found[0], found[0]), text)

    def _field(self, found: re.Match[str]) -> str:
        name, value = f'"{self._fields[found[1]]}"', found[2]
        return name if value == "…" else f"{name}: {json.dumps(literal_eval(value))}"


def same(names: Iterable[str]) -> dict[str, str]:
    """Return keywords that are fields of the same name."""
    return {name: name for name in names}
