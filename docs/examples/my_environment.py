"""An environment of your own, in plain synchronous Python.

Two methods in the way of Gymnasium and GEM are enough. Offer it from an agent worker, then name it in a run:

    rollfab agent --environment countdown=docs.examples.my_environment:Countdown
    fabric.run("countdown", model="tiny", environment="countdown", environment_options={"start": 5})

Agent workers import it by the name they were started with; a name that arrives with a run is never imported.
"""

from __future__ import annotations

from typing import Any

from rollfab.workers.environments.base import TextSampling


class Countdown:
    """Write the digit below the one you read, until 0.

    The same seed and actions give the same answers, so a trajectory whose agent worker died is replayed elsewhere.
    """

    sampling = TextSampling(max_tokens=1)  # one character per turn
    turn_count_max = 12
    inline = True  # it never blocks and may be trusted: leave this out and it has a process of its own

    def __init__(self, start: int = 5) -> None:
        self.start = start
        self.left = start

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """The first observation, and facts about it."""
        self.left = self.start
        return str(self.left), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Observation, reward, terminated, truncated, facts."""
        if action != str(self.left - 1):
            return str(self.left), -0.05, False, False, {}  # wrong, and not the end: else nothing could be learnt
        self.left -= 1
        is_over = self.left == 0
        return str(self.left), 1.0 / self.start, is_over, False, {"success": is_over}
