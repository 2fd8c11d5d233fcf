"""Score: how likely a model finds tokens that another one made, such as a teacher its student's.

A task has the tokens as "ids". The turn that follows makes one token, which means nothing; what counts is what it
records of its prompt (fabric/contract/sides.py: prompt_logprobs, and the likeliest tokens where the run asks for them).
"""

from __future__ import annotations

from typing import Any

from ...fabric.contract.errors import EnvironmentFailed
from .base import Environment, Observation, Step, TextSampling


class Score(Environment):
    """Reads the task's ids, and ends."""

    name = "score"
    sampling = TextSampling(max_tokens=1, prompt_logprobs=0)
    turn_count_max = 1
    inline = True

    async def reset(self, task: dict[str, Any], seed: int) -> Observation:
        ids = task.get("ids")
        if not isinstance(ids, list) or not ids:
            raise EnvironmentFailed('the task has no "ids", a list of at least one token id', reason="reset")
        return Observation(ids=ids)

    async def step(self, action: Any) -> Step:
        return Step("", 0.0, terminated=True)
