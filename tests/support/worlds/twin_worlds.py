"""The same world twice, inside the agent and in a process: what one may state and say, the other may too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollfab.workers.environments.base import Environment, Observation, Step
from tests.support.worlds.chat_worlds import ADD


class Inside(Environment):
    """States its options as its settings; a task's "late" are stated at the reset only.

    cannot_be_sent: the name of a setting that is no JSON.
    """

    inline = True

    def __init__(self, cannot_be_sent: str = "", **settings: Any) -> None:
        vars(self).update(settings)
        if cannot_be_sent:
            setattr(self, cannot_be_sent, {1, 2})

    async def reset(self, task: dict[str, Any], seed: int) -> Observation:
        vars(self).update(task.get("late", {}))
        return Observation("?")

    async def step(self, action: Any) -> Step:
        return Step("again?", 0.5)


class InAProcess(Inside):
    inline = False


USER = {"role": "user", "content": "one and two?"}


def image_of(count: int) -> dict[str, Any]:
    """A message with an image that takes so many characters."""
    url = f"data:image/png;base64,{'A' * count}"
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}


OBSERVATIONS: dict[str, Callable[[], Any]] = {
    "well": lambda: Observation(messages=[USER], tools=[ADD]),
    "a text": lambda: Observation("?"),
    "a tuple": lambda: Observation(messages=(USER,), tools=(ADD,)),  # type: ignore[arg-type]
    "None beside messages": lambda: Observation(messages=[USER], tools=None),  # type: ignore[arg-type]
    "a text and messages": lambda: Observation("?", messages=[USER]),
    "a text and tools": lambda: Observation("?", tools=[ADD]),
    "messages that are a text": lambda: Observation(messages="one and two?"),  # type: ignore[arg-type]
    "messages that are 0": lambda: Observation("?", messages=0),  # type: ignore[arg-type]
    "tools that are a text": lambda: Observation(messages=[USER], tools="add"),  # type: ignore[arg-type]
    "bytes": lambda: Observation(messages=[{"role": "user", "content": b"?"}]),
    "a key that is a number": lambda: Observation(messages=[{**USER, 1: "?"}]),
    "info that is no JSON": lambda: Observation(messages=[USER], info={"world": Observation}),
    "large messages": lambda: Observation(messages=[{**USER, "content": "x" * (2 << 20)}]),
    "a large image": lambda: Observation(messages=[image_of(2 << 20)]),
    "larger images": lambda: Observation(messages=[image_of(3 << 20)] * 2),
    "large tools": lambda: Observation(messages=[USER], tools=[{**ADD, "more": "x" * (2 << 20)}]),
}
STEPS: dict[str, Callable[[], Any]] = {
    "well": lambda: Step("", 0.5, messages=[USER]),
    "a text": lambda: Step("again?", 0.5),
    "a tuple": lambda: Step("", 0.5, messages=(USER,)),  # type: ignore[arg-type]
    "None beside a text": lambda: Step("again?", 0.5, messages=None),  # type: ignore[arg-type]
    "True": lambda: Step("again?", True),
    "a text and messages": lambda: Step("again?", 0.5, messages=[USER]),
    "a text and messages at the end": lambda: Step("again?", 0.5, terminated=True, messages=[USER]),
    "a reward in words": lambda: Step("again?", "1"),  # type: ignore[arg-type]
    "messages that are a text": lambda: Step("", 0.5, messages="again?"),  # type: ignore[arg-type]
    "no messages at the end": lambda: Step("", 0.5, terminated=True, messages=[{"role": "nobody"}]),
    "large messages at the end": lambda: Step("", 0.5, True, messages=[{**USER, "content": "x" * (5 << 20)}]),
    "a large text at the end": lambda: Step("x" * (5 << 20), 0.5, terminated=True),
    "info that is no JSON": lambda: Step("again?", 0.5, info={"world": Step}),
    "nothing": lambda: Step("", 0.5),
}


class AnswersInside(Environment):
    """Begins and goes on as its options name it."""

    inline = True
    turn_count_max = 2

    def __init__(self, reset: str = "well", step: str = "well", tool_choice: Any = None) -> None:
        self._reset, self._step = reset, step
        self.tool_choice = tool_choice

    async def reset(self, task: dict[str, Any], seed: int) -> Observation:
        observation: Observation = OBSERVATIONS[self._reset]()
        return observation

    async def step(self, action: Any) -> Step:
        step: Step = STEPS[self._step]()
        return step


class AnswersInAProcess(AnswersInside):
    inline = False
