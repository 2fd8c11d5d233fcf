"""The trainer's side: what a step waits for.

- Synchronous: rollouts, then training, then weights; the next step's rollouts begin with them.
- One step ahead: while a step is trained the next one's rollouts run, with weights that are one version older at most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .cluster import Cluster
from .machine.tails import TailBatches
from .machine.workload import Group, StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """A step that is over, in seconds: from its beginning to its successor's; its rollouts alone. at_s: its end. part:
    of a whole step's groups, that it had.
    """

    step_s: float
    rollout_s: float
    began_s: float
    at_s: float
    part: float = 1.0


@dataclass
class Trainer:
    """Runs steps until enough are done. on_rollouts: told when rollouts begin (True) and end. tails: makes the steps,
    if what is long is put off; then steps follow until nothing is.
    """

    cluster: Cluster
    draw: Callable[[int], StepPlan]
    step_count: int
    train_s: float
    transfer_s: float
    is_ahead: bool = False
    on_rollouts: Callable[[bool], None] = lambda begins: None
    tails: TailBatches | None = None
    steps: list[StepTimes] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)
    _drawn: int = 0
    _trained: int = 0
    _rolled: int = 0
    _is_training: bool = False
    _waiting: list[tuple[float, float, float]] = field(default_factory=list)  # not trained: began, ended, its part
    _last_s: float = 0.0

    @property
    def done(self) -> tuple[list[StepTimes], list[StepPlan]]:
        """The steps that are done and what they were, without the first of an arm that runs ahead."""
        first = int(self.is_ahead)
        return self.steps[first:], self.plans[first : len(self.steps)]

    @property
    def is_over(self) -> bool:
        """True if all steps are done."""
        is_left = self.tails is not None and (self.tails.put_off_count or len(self.plans) > len(self.steps))
        return len(self.steps) >= self.step_count and not is_left

    def start(self) -> None:
        """Begin the first step."""
        self.cluster.events.at(0.0, self._begin)

    def _begin(self) -> None:
        plan = self._next()
        self.plans.append(plan)
        self._drawn += 1
        began_s = self.cluster.events.now_s
        self.on_rollouts(True)
        self.cluster.submit(plan, lambda left: self._rolled_out(began_s, plan, left))

    def _next(self) -> StepPlan:
        if self.tails is None:
            return self.draw(self._drawn)
        return self.tails.next(is_last=len(self.steps) >= self.step_count)

    def _rolled_out(self, began_s: float, plan: StepPlan, left: list[Group]) -> None:
        self.on_rollouts(False)
        if self.is_over and len(self.cluster.beside) > 1:
            return  # others still have steps to do, and its share of the workers
        if self.tails is not None:
            self.tails.put_off(left)
        self._rolled += 1
        part = 1.0 if self.tails is None else plan.needed / self.tails.group_count
        self._waiting.append((began_s, self.cluster.events.now_s, part))
        self._train()
        if self.is_ahead:
            self._go_ahead()

    def _go_ahead(self) -> None:
        """Begin the next rollouts, unless they would be more than one version behind."""
        if self._rolled == self._drawn and self._drawn - self._trained <= 1:
            self._begin()

    def _train(self) -> None:
        if not self._is_training and self._waiting:
            self._is_training = True
            self.cluster.events.after(self._waiting[0][2] * self.train_s + self.transfer_s, self._publish)

    def _publish(self) -> None:
        began_s, rolled_s, part = self._waiting.pop(0)
        now_s = self.cluster.events.now_s
        self._is_training = False
        self._trained += 1
        self.cluster.publish()
        self.steps.append(
            StepTimes(step_s=now_s - self._last_s, rollout_s=rolled_s - began_s, began_s=began_s, at_s=now_s, part=part)
        )
        self._last_s = now_s
        if self.is_over:
            return
        self._train()
        if self.is_ahead:
            self._go_ahead()
        else:
            self._begin()
