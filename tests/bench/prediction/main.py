"""`rollfab bench prediction`: what the simulated cluster says of real runs, beside what they do.

- Real: a broker, a controller, an agent, workers with the transformers engine on the CPU, and a trainer that publishes
  after each step. `rollfab sim` has no part in it.
- Predicted: the same trajectories in the simulated cluster (deploy/simulation), which is told the engine's step, the
  environment's and the trainer's, and how long publishing took before the first step. Nothing is fitted to what is
  compared.
- Steps of the engine are held to a fixed time, as a device's hardly hang on what the machine does beside; in the last
  case they are not, and the cost of a step is fitted to two other turns.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from rollfab.deploy.cli.options import with_ports
from rollfab.deploy.replay.figures import Report, number, show
from rollfab.deploy.simulation.arms import unguarded
from rollfab.deploy.simulation.cluster import Cluster, Setup
from rollfab.deploy.simulation.lending import Lender, Nobody, Planned
from rollfab.deploy.simulation.machine.cost import Model, StepCost
from rollfab.deploy.simulation.machine.workload import StepPlan, TrajectoryPlan, TurnPlan
from rollfab.deploy.simulation.training import Trainer
from rollfab.fabric.contract.errors import FabricError
from tests.bench.lively import lively_weights
from tests.bench.measure import Figure

from ..overhead.arms import WholeFabric, Workload

THROUGHPUT_OFF, STEP_OFF = 0.05, 0.10  # what was wanted: tokens a second, and each step, so far off at most
GROUP_SIZE = 2
TURN_COUNT_MAX = 48  # of which the tiny preset holds the tokens
PROMPT_TOKENS = OBSERVATION_TOKENS = 2
TRAIN_S = 1.0
SPREAD = (2, 3, 3, 4, 4, 5, 5, 6, 7, 7, 8, 9, 11, 13, 18, 28)  # lognormal, as terminal agents'
POOL = "bench"
FIT_TOKENS = 96
KV_TOKENS = 1_000_000  # memory is no matter here


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is run. step_s: of the engine, at least; 0: as fast as it can. pause_s: before the environment answers.

    lent_count: the workers beside `worker_count` that may be lent; switched: when their team switches lending, and to
    what, in seconds from the first step's beginning.
    """

    name: str
    turn_counts: tuple[int, ...] = SPREAD
    worker_count: int = 1
    slot_count: int = 8
    place_count: int = 8
    pause_s: float = 0.0
    step_s: float = 0.25
    completion_tokens: int = 4
    model: str = "tiny"
    lent_count: int = 0
    switched: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured: so many steps of each case."""

    cases: tuple[Case, ...]
    step_count: int


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Steps of a case, in seconds each: from its beginning to the next one's; and the tokens made in all of them."""

    step_s: tuple[float, ...]
    token_count: int

    @property
    def tokens_per_s(self) -> float:
        return self.token_count / sum(self.step_s)


FULL = Settings(
    cases=(
        Case(name="a place a slot"),
        Case(name="turns wait for slots", place_count=32),
        Case(name="two workers, tools of 0.4 s", worker_count=2, slot_count=4, place_count=16, pause_s=0.4),
        Case(name="long turns", turn_counts=(1, 1, 2, 2, 2, 3, 3, 5), completion_tokens=24),
        Case(
            name="a worker that is lent, taken back, and lent again",
            slot_count=4,
            place_count=16,
            lent_count=1,
            switched=((10.0, "off"), (20.0, "on")),
        ),
        Case(name="the engine at its own pace", model="small", step_s=0.0, completion_tokens=16),
    ),
    step_count=3,
)
HALF = Settings(
    cases=tuple(replace(FULL.cases[index], turn_counts=SPREAD[::2]) for index in (1, 2, 4)),
    step_count=2,
)
QUICK = replace(HALF, cases=(replace(HALF.cases[0], step_s=0.1),))


def measure(settings: Settings) -> Report:
    """Run and predict every case.

    Raises:
        FabricError: a process of a fabric ended, or not all groups came.
    """
    rows = [measure_case(case, settings.step_count) for case in settings.cases]
    return Report(
        name="prediction",
        params={"settings": asdict(settings), "goal": {"throughput": THROUGHPUT_OFF, "step": STEP_OFF}},
        results={"rows": rows},
        baselines={},
        ratio={"throughput": {row["name"]: row["throughput_ratio"] for row in rows}},
    )


def measure_case(case: Case, step_count: int) -> dict[str, Any]:
    """Run a case's steps on a fabric, and in the simulated cluster; ratios are of predicted over real."""
    plans = [tasks_of(case, step) for step in range(step_count)]
    with fabric_of(case) as fabric:
        transfer_s = warm_up(fabric, case)
        cost = even(case.step_s) if case.step_s else fitted(fabric)
        real = run_for_real(fabric, case, plans)
    told = predict(case, plans, cost, transfer_s)
    steps = Figure(tuple(one / other for one, other in zip(told.step_s, real.step_s, strict=True)))
    return {
        "name": case.name,
        "is_held": case.step_s > 0,
        "step_s": {"real": list(real.step_s), "predicted": list(told.step_s)},
        "tokens_per_s": {"real": real.tokens_per_s, "predicted": told.tokens_per_s},
        "throughput_ratio": told.tokens_per_s / real.tokens_per_s,
        "step_ratio": steps.median,
        "step_ratio_spread": steps.spread,
    }


def tasks_of(case: Case, step: int) -> list[dict[str, Any]]:
    """Return a step's tasks, each with its own number of turns: the case's, in another order each step."""
    counts = list(case.turn_counts)
    random.Random(step).shuffle(counts)
    return [_task(f"{step}-{index}", case, count) for index, count in enumerate(counts)]


def _task(name: str, case: Case, turn_count: int) -> dict[str, Any]:
    tokens = {"turn_count": turn_count, "completion_tokens": case.completion_tokens}
    return {"task_id": name, "pause_s": case.pause_s, **tokens}


# ---- for real


def fabric_of(case: Case) -> WholeFabric:
    """Make a fabric for a case, not started."""
    workload = Workload(
        name=case.name,
        model=case.model,
        trajectory_count=GROUP_SIZE * len(case.turn_counts),
        turn_count=TURN_COUNT_MAX,
        completion_tokens=case.completion_tokens,
        observation_tokens=OBSERVATION_TOKENS,
    )
    words = ["bench", "paced", "--model", case.model, "--slots", str(case.slot_count), "--step", str(case.step_s)]
    lent = [*words, "--role", "serving", "--pool", POOL]
    own = {f"worker-{index}": words for index in range(case.worker_count)}
    return WholeFabric(
        workload,
        lively_weights(case.model),
        run_options={"longest_first": False, "nearest_first": False},
        place_count=case.place_count,
        workers={**own, **{f"lent-{index}": lent for index in range(case.lent_count)}},
    )


def warm_up(fabric: WholeFabric, case: Case) -> float:
    """Have every worker at work once; returns how long it takes to publish, in seconds.

    Raises:
        FabricError: not all groups came.
    """
    if case.lent_count:
        say(fabric.url, "on")
    trajectory_count = case.slot_count * (case.worker_count + case.lent_count)
    for count in range(2):
        tasks = [_task(f"first-{count}-{index}", case, 2) for index in range(trajectory_count // GROUP_SIZE)]
        if len(fabric.ask(tasks, group_size=GROUP_SIZE)) < len(tasks):
            raise FabricError(f"case {case.name}: not all groups came before the first step")
    taken = []
    for _ in range(3):
        start_s = time.perf_counter()
        fabric.publish()
        taken.append(time.perf_counter() - start_s)
    return Figure(tuple(taken)).median


def even(step_s: float, sequence_s: float = 0.0) -> StepCost:
    """Steps that all take as long, but for sequence_s of each sequence in them."""
    zero = dict.fromkeys(("weights_ms", "token_us", "context_us_per_1000", "attention_ns", "cpu_step_ms"), 0.0)
    return StepCost(fixed_ms=1000 * step_s, cpu_sequence_ms=1000 * sequence_s, **zero)


def fitted(fabric: WholeFabric) -> StepCost:
    """Fit the cost of a step to turns alone and together: one, and as many as there are slots."""
    case = Case(name="fit", completion_tokens=FIT_TOKENS)
    took = {}
    for count in (1, 4):
        tasks = [_task(f"fit-{count}-{index}", case, 1) for index in range(count)]
        took[count * GROUP_SIZE] = fabric.timed(tasks, GROUP_SIZE)[1] / FIT_TOKENS
    (few, few_s), (many, many_s) = sorted(took.items())
    each_s = max(0.0, (many_s - few_s) / (many - few))
    return even(few_s - few * each_s, each_s)


def run_for_real(fabric: WholeFabric, case: Case, plans: Sequence[Sequence[dict[str, Any]]]) -> Steps:
    """Train as a synchronous trainer does, whose training is a pause.

    Raises:
        FabricError: not all groups came, or not with all their turns.
    """
    found, token_count = [], 0
    with switching(fabric.url, case.switched):
        for tasks in plans:
            start_s = time.perf_counter()
            groups = fabric.ask(tasks, group_size=GROUP_SIZE)
            tokens = sum(int(rollout.completion_mask.sum()) for group in groups for rollout in group.rollouts)
            asked = GROUP_SIZE * case.completion_tokens * sum(task["turn_count"] for task in tasks)
            if tokens != asked:
                raise FabricError(f"{tokens} tokens of {asked} came, in {len(groups)} of {len(tasks)} groups")
            token_count += tokens
            time.sleep(TRAIN_S)
            fabric.publish()
            found.append(time.perf_counter() - start_s)
    return Steps(step_s=tuple(found), token_count=token_count)


def say(url: str, mode: str) -> None:
    """Let the team of what may be lent switch lending."""
    with_ports(url, lambda ports: ports.board.set_lend(f"pool:{POOL}", mode))


@contextmanager
def switching(url: str, switched: Sequence[tuple[float, str]]) -> Iterator[None]:
    """Let the team of what is lent switch lending while the block runs, in a thread."""
    is_over = threading.Event()

    def switch() -> None:
        passed_s = 0.0
        for at_s, mode in switched:
            if is_over.wait(at_s - passed_s):
                return
            say(url, mode)
            passed_s = at_s

    thread = threading.Thread(target=switch, name="team")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


# ---- predicted


def predict(case: Case, plans: Sequence[Sequence[dict[str, Any]]], cost: StepCost, transfer_s: float) -> Steps:
    """Simulate the same steps. cost: of a step of the engine; transfer_s: what publishing takes, and fetching."""
    model = Model(cost=cost, kv_bytes=1, weight_gb=0.0)
    cluster = Cluster(
        Setup(
            rollout=model,
            serving=model,
            dedicated=case.worker_count,
            lendable=case.lent_count,
            slot_count=case.slot_count,
            kv_dedicated=KV_TOKENS,
            kv_lent=KV_TOKENS,
            kv_serving=KV_TOKENS,
            turn_tokens_max=case.completion_tokens,
            activation_s=0.0,
            fetch_s=transfer_s,
            ttft_ms=500.0,
            tpot_ms=150.0,
            noise=0.0,
            places="home",
            policy=unguarded,  # nobody serves, so nobody guards
        )
    )
    cluster.agents.place_count = case.place_count
    lender: Lender = Planned() if case.lent_count else Nobody()
    drawn = [_plan(case, tasks) for tasks in plans]
    trainer = Trainer(
        cluster=cluster,
        draw=drawn.__getitem__,
        step_count=len(plans),
        train_s=TRAIN_S,
        transfer_s=transfer_s,
        on_rollouts=lender.rollouts,
    )
    lender.start(cluster)
    if isinstance(lender, Planned):
        for at_s, mode in case.switched:
            cluster.events.at(at_s, lender.say, mode)
    trainer.start()
    cluster.events.run(lambda: trainer.is_over, 1e6)
    cluster.check()
    return Steps(step_s=tuple(each.step_s for each in trainer.steps), token_count=cluster.books.kept)


def _plan(case: Case, tasks: Sequence[dict[str, Any]]) -> StepPlan:
    turn = TurnPlan(case.completion_tokens, OBSERVATION_TOKENS, case.pause_s)
    groups = [(TrajectoryPlan(PROMPT_TOKENS, (turn,) * task["turn_count"]),) * GROUP_SIZE for task in tasks]
    return StepPlan(groups=groups, needed=len(groups), kept=frozenset(range(len(groups))))


def faults(report: Report) -> list[str]:
    """List the predictions that are further off than was wanted, of steps that are held to a time."""
    said = []
    for row in (each for each in report.results["rows"] if each["is_held"]):
        if abs(row["throughput_ratio"] - 1) > THROUGHPUT_OFF:
            said.append(f"{row['name']}: {row['throughput_ratio']:.3f} of the tokens a second were predicted")
        off = [each for each in sorted(set(row["step_ratio_spread"])) if abs(each - 1) > STEP_OFF]
        said += [f"{row['name']}: a step was predicted to take {each:.3f} of its time" for each in off]
    return said


def print_table(report: Report) -> None:
    found = json.loads(report.json())
    rows = []
    for each in found["results"]["rows"]:
        low, high = each["step_ratio_spread"]
        rows.append(
            [
                each["name"],
                number(each["tokens_per_s"]["real"]),
                number(each["tokens_per_s"]["predicted"]),
                f"{each['throughput_ratio']:.3f}",
                f"{each['step_ratio']:.3f}  ({low:.3f} to {high:.3f})",
            ]
        )
    columns = ["", "real tokens/s", "predicted", "predicted ÷ real", "steps, predicted ÷ real"]
    wanted = f"wanted: throughput within {THROUGHPUT_OFF:.0%}, steps within {STEP_OFF:.0%}"
    show("rollfab bench prediction", columns, rows, [f"{wanted}; CPU; machine: {found['machine']}"])
