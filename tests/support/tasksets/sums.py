"""A taskset of verifiers with one turn and two rewards; runs in .venv-clients, which has verifiers."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["Sums"]


class SumData(vf.TaskData):
    """What is asked."""

    answer: str


class Sum(vf.Task[SumData, vf.State, vf.TaskConfig]):
    """Adds two numbers."""

    @vf.reward(weight=1.0)
    async def right(self, task: SumData, trace: vf.Trace) -> float:
        """Pay for the sum."""
        return float(task.answer in trace.last_reply)

    @vf.reward(weight=0.25)
    async def length(self, trace: vf.Trace) -> float:
        """Pay for every letter."""
        return float(len(trace.last_reply))


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    """Five sums."""

    def load(self) -> Iterator[Sum]:
        """Make the rows."""
        for index in range(5):
            data = SumData(prompt=f"{index}+{index}?", system_prompt="Add.", answer=str(2 * index))
            yield Sum(data, self.config.task)
