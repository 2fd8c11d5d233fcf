"""`rollfab bench conversation`: what one more turn of a long chat costs the agent that plays it, in processor time.

- A world answers each tool call of a scripted policy with some lines of text. Ours renders the conversation once, and
  encodes what is new (fabric/chat/conversation.py).
- The baseline is what a chat server does with each request: it renders and encodes the whole conversation.
- The floor is to render all and to encode what is new, as any template must be asked what it writes.
- The tokenizer is a small one made here: its tokens are shorter than a model's, so the baseline encodes more of them.

Exit code 1 when a context of ours does not say what the template writes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from random import Random
from statistics import median
from typing import Any

import numpy as np

from rollfab.deploy.replay.figures import Report, number, show
from rollfab.fabric.chat.conversation import Conversation
from rollfab.fabric.chat.messages import Message
from tests.unit.fabric.chat.families import chat_template

FAMILY, END = "qwen3", "<|im_end|>"
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {"place": {"type": "string"}}}},
    }
]
WORDS = "def return self import the file line error test assert value 1 2 3 ( ) { } <b> = == .".split()
OURS, WHOLE, FLOOR = "ours", "all anew", "floor"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """turn_counts: after how many turns one more is measured. word_count: of what the world says. round_count: each."""

    turn_counts: tuple[int, ...]
    word_count: int
    round_count: int


FULL = Settings(turn_counts=(10, 50, 100, 200), word_count=350, round_count=5)
QUICK = Settings(turn_counts=(3, 10), word_count=100, round_count=3)


def measure(settings: Settings) -> Report:
    """Play one conversation, and measure a turn of it wherever the settings say."""
    chat = _Chat(settings.word_count)
    rows: list[dict[str, Any]] = []
    for turn_count in settings.turn_counts:
        chat.play(turn_count)
        ways = {OURS: chat.ours, WHOLE: chat.whole, FLOOR: chat.floor}
        found: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(settings.round_count):
            for way, work in ways.items():
                found[way].append(_cpu_ms(work))
        spread = max(found[OURS]) / min(found[OURS])
        row = {"turn_count": turn_count, "token_count": len(chat.ask.context_ids), "spread": spread}
        rows.append({**row, **{way: median(each) for way, each in found.items()}, "is_right": chat.is_right()})
    last = rows[-1]
    return Report(
        name="conversation",
        params={"settings": asdict(settings), "template": FAMILY},
        results={"rows": rows, "wrong_count": sum(not row["is_right"] for row in rows)},
        baselines={WHOLE: [row[WHOLE] for row in rows], FLOOR: [row[FLOOR] for row in rows]},
        ratio={"over_all_anew": last[WHOLE] / last[OURS], "of_floor": last[FLOOR] / last[OURS]},
    )


def faults(report: Report) -> list[str]:
    """Tell whether every context said what the template writes."""
    count = report.results["wrong_count"]
    return [f"{count} contexts are not what the template writes"] if count else []


class _Chat:
    """A conversation, and the three ways to a turn's context.

    The policy writes each answer as the template does, so that the path has no branch.
    """

    def __init__(self, word_count: int) -> None:
        self._template = chat_template(FAMILY)
        self._conversation = Conversation(self._template)
        self._dice = Random(7)
        self._word_count = word_count
        self._messages: list[Message] = []
        self._say({"role": "user", "content": self._words()})
        self._turn_count = 0
        self.ask = self._conversation.ask_taken(self._messages, TOOLS)

    def play(self, turn_count: int) -> None:
        """Go on until so many turns were answered."""
        while self._turn_count < turn_count:
            call = json.dumps({"name": "look", "arguments": {"place": f"p{self._turn_count}"}})
            ids = self._template.encode(f"<think>\nok\n</think>\n\nI look.\n<tool_call>\n{call}\n</tool_call>{END}")
            answer = self._conversation.answer(self.ask, ids, np.zeros(len(ids), np.float32))
            self._messages = [*self.ask.messages, answer.message]
            name = answer.message["tool_calls"][0]["id"]
            self._say({"role": "tool", "content": self._words(), "tool_call_id": name})
            self._turn_count += 1
            self.ask = self._conversation.ask_taken(self._messages, TOOLS)

    def _say(self, message: Message) -> None:
        self._messages += self._conversation.take([message])

    def _words(self) -> str:
        return " ".join(self._dice.choices(WORDS, k=self._word_count))

    def ours(self) -> None:
        """Ask for the next turn's context."""
        self._conversation.ask_taken(self._messages, TOOLS)

    def whole(self) -> None:
        """Render and encode all that was said."""
        self._template.encode(self._rendered())

    def floor(self) -> None:
        """Render all, and encode what the world said last."""
        self._template.encode(self._rendered()[-len(self._template.decode(self.ask.added_ids)) :])

    def is_right(self) -> bool:
        """Whether the context says what the template writes."""
        return self._template.decode(self.ask.context_ids) == self._rendered()

    def _rendered(self) -> str:
        return self._template.render(self._messages, TOOLS, answer=True)


def _cpu_ms(work: Callable[[], None]) -> float:
    begun_s = time.process_time()
    work()
    return (time.process_time() - begun_s) * 1000


def print_table(report: Report) -> None:
    rows = [
        [
            f"{row['turn_count']:,} turns, {row['token_count']:,} tokens",
            *(f"{number(row[way])} ms" for way in (OURS, WHOLE, FLOOR)),
            f"{row['spread']:.2f}",
        ]
        for row in report.results["rows"]
    ]
    notes = [
        f"at the end: {number(report.ratio['over_all_anew'])} times less than all anew, "
        f"{report.ratio['of_floor']:.2f} of the floor",
        f"machine: {report.machine}",
    ]
    show(
        "rollfab bench conversation: the agent's processor time for the next turn's context, medians",
        ["after", OURS, WHOLE, FLOOR, "ours, slowest over fastest"],
        rows,
        notes,
    )
