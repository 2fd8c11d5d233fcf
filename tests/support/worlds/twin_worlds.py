"""The same world twice, inside the agent and in a process: what one may state and say, the other may too."""

from __future__ import annotations

from typing import Any

from rollfab.workers.environments.base import Environment, Observation, Step


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
