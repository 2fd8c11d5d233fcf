"""An environment that needs a process of its own: it runs regular expressions that a policy has written.

Some of those never come to an end ("^([a-z]?){99}!" tries a billion ways through "banana"), and while one runs it holds
the interpreter's lock: neither a thread nor a time limit in the same process could end it. `isolation` can.

    rollfab agent --environment regex-golf=docs.examples.regex_golf:RegexGolf

It imports nothing but the standard library, so it also runs in a virtual environment that has no rollfab:

    rollfab agent --environment regex-golf=/path/to/venv/bin/python:regex_golf:RegexGolf
"""

from __future__ import annotations

import random
import re
from typing import Any

WORDS = "apple banana cherry damson elder fig grape hazel kiwi lemon mango nectarine olive peach quince".split()
SIDE_COUNT = 3


class RegexGolf:
    """Write an expression that matches the first words and none of the others; each turn is another try."""

    isolation = "process"  # as is the default: it says so because it could not do without
    memory_bytes_max = 1 << 30
    turn_count_max = 4
    sampling = {"max_tokens": 24, "stop": ("\n",)}  # noqa: RUF012

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """The words, drawn from the seed: a replay meets the same."""
        words = random.Random(seed).sample(WORDS, 2 * SIDE_COUNT)
        self.wanted, self.others = words[:SIDE_COUNT], words[SIDE_COUNT:]
        return f"{' '.join(self.wanted)} / {' '.join(self.others)}\n", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """How many words it tells apart."""
        try:
            expression = re.compile(action.strip())
        except re.error as error:
            return f"{error}\n", -0.05, False, False, {}
        right = sum(bool(expression.search(word)) for word in self.wanted)
        right += sum(not expression.search(word) for word in self.others)
        is_solved = right == 2 * SIDE_COUNT
        return f"{right}\n", float(is_solved), is_solved, False, {"success": is_solved}
