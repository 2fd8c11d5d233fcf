"""Small scenarios, and a lone simulated engine, for tests of the simulator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

from rollfab.deploy.simulation.machine.books import Books
from rollfab.deploy.simulation.machine.cost import model_of
from rollfab.deploy.simulation.machine.engine import Engine, EngineOptions
from rollfab.deploy.simulation.machine.events import Events
from rollfab.deploy.simulation.machine.serving import ServingSide
from rollfab.deploy.simulation.machine.turns import Batch, GroupState, Trajectory, Turn
from rollfab.deploy.simulation.machine.workload import StepPlan, TrajectoryPlan, TurnPlan
from rollfab.deploy.simulation.run import Run, simulate
from rollfab.deploy.simulation.scenario import ClusterPart, Scenario, ServingPart, TrainerPart, WorkPart
from tests.support.tried import cases

COST = model_of("Qwen3-8B", "h100", 1).cost
SERVING_COST = model_of("Qwen2.5-7B", "h100", 1).cost
SMALL = Scenario(
    name="small",
    cluster=ClusterPart(dedicated=1, serving=1, slots=4),
    serving=ServingPart(loads=(0.25,), capacity_per_s=18.0),
    work=WorkPart(kind="frozenlake", groups=4, group_size=4, steps=1),
    trainer=TrainerPart(train_s=10.0),
)


def arms(names: Iterable[str]) -> list[str]:
    """Return all arms, or in a look three that differ in nearly everything."""
    unlike = ("fixed", "rose", "ours")
    return cases(sorted(names, key=lambda name: name not in unlike), len(unlike))


def run(arm: str, scenario: Scenario = SMALL, *, load: float = 0.25, seed: int = 0) -> Run:
    return simulate(scenario, arm, load=load, seed=seed)


def outcome(found: Run) -> dict[str, Any]:
    """All of it but what the machine took."""
    kept = replace(found, cpu_s=0.0)
    return {each.name: getattr(kept, each.name) for each in fields(kept)}


class Lone:
    """One dedicated engine, without noise, and what became of its turns."""

    def __init__(self, *, slots: int = 4, kv_tokens: int = 400_000, serving: ServingSide | None = None) -> None:
        self.events, self.books = Events(), Books()
        self.ended: dict[tuple[int, int], tuple[float, int]] = {}
        self.back: list[Turn] = []
        options = EngineOptions(
            name="own",
            cost=COST,
            slot_count=slots,
            kv_tokens=kv_tokens,
            turn_tokens_max=4096,
            chunk_tokens=2048 if serving is None else 512,
        )
        self.engine = Engine(
            options, self.events, self.books, serving=serving, on_end=self._ended, on_back=self._came_back
        )

    def turn(self, number: int, prompt: int, output: int) -> Turn:
        plan = TrajectoryPlan(prompt, (TurnPlan(output, 0, 0.0),))
        step = StepPlan(groups=[(plan,)], needed=1, kept=frozenset({0}))
        batch = Batch(plan=step, on_done=lambda: None, began_s=0.0, missing_groups=1)
        trajectory = Trajectory(number, plan, GroupState(batch=batch, index=0, quorum=1, missing=1))
        return Turn(trajectory, 0, prompt, prompt, output)

    def run(self, until_s: float = 1e9) -> None:
        self.events.run(lambda: False, until_s)

    def _ended(self, engine: Engine, turns: list[Turn]) -> None:
        for turn in turns:
            assert turn.key not in self.ended
            self.ended[turn.key] = (self.events.now_s, turn.made)

    def _came_back(self, engine: Engine, turns: list[Turn]) -> None:
        self.back += turns
