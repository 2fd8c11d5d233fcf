"""The arms that are compared: each is who lends, who guards, who places, and what a step waits for.

- Ours is production's rules, called and not copied; the ablations take one of them away by its own settings.
- Others' rules are ours to write, after what their authors published. Each has what suits it: turns that go where their
  context is, and as many trajectories under way as it has slots, so that none loses its prefix to another.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from ...fabric.rules.serving import guard as production
from ...fabric.rules.serving.facts import StepWork
from ...fabric.rules.serving.guard import Allowance, GuardFacts, GuardRule
from ...fabric.rules.serving.step_time import predict
from ...workers.serving.guarding.guard import Policy
from .borrowing import Elastic, Spot
from .lending import Always, Lender, Nobody, Planned, WholeSteps
from .machine.order import Affine, ByLength, Levels, Router

SMALL_CHUNK = 512  # of serving prompts, which ROSE sets while it shares


def rose(facts: GuardFacts, rule: GuardRule) -> Allowance:
    """Decide as ROSE does: a rollout step runs while every request has slack, by the times that were profiled.

    Slack: arrival plus TTFT objective, or last token plus TPOT objective, less now, the rollout step, and what the
    request waits for. There is no reserve, and no margin. Its profile is here the model that our guard learns.
    """
    state = facts.state
    if state is None:
        return Allowance(step_tokens=0, reason="there is no probe")
    roll_s = predict(facts.rollout, facts.work)
    decoding = StepWork(decode_count=len(state.running), context_tokens=sum(e.context_tokens for e in state.running))
    slack_s = math.inf
    if state.running:
        slack_s = 1e-3 * facts.slo.tpot_ms - roll_s - predict(facts.serving, decoding)
    ahead = 0
    for each in state.waiting:
        ahead += each.prefill_tokens
        prompt_s = predict(facts.serving, replace(decoding, prefill_tokens=ahead))
        prompt_s += predict(facts.serving, decoding) * (ahead // SMALL_CHUNK)
        slack_s = min(slack_s, each.arrived_at_s + 1e-3 * facts.slo.ttft_ms - facts.now_s - roll_s - prompt_s)
    is_open = slack_s > 0
    return Allowance(step_tokens=None if is_open else 0, reason="slack" if is_open else "no slack", room_s=slack_s)


def unguarded(facts: GuardFacts, rule: GuardRule) -> Allowance:
    """Let everything run."""
    return Allowance(step_tokens=None, reason="nobody guards", room_s=1.0)


def idle_only(facts: GuardFacts, rule: GuardRule) -> Allowance:
    """Let rollouts run while no serving request is there."""
    is_idle = facts.state is not None and not (facts.state.running or facts.state.waiting)
    return Allowance(step_tokens=None if is_idle else 0, reason="idle" if is_idle else "serving", room_s=0.0)


def no_reserve(facts: GuardFacts, rule: GuardRule) -> Allowance:
    """Decide as production does, with nothing kept free for what may arrive."""
    return production.decide(replace(facts, reserve_s=0.0), rule)


def no_pace(facts: GuardFacts, rule: GuardRule) -> Allowance:
    """Decide as production does, and use the whole pace up, however much of serving's time and memory is taken."""
    state = facts.state
    free = replace(state, kv_capacity_tokens=0) if state is not None else None
    return production.decide(replace(facts, state=free), replace(rule, horizon_of_ttft=1e9))


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A way to run the cluster. lender: made anew for each run; is_static: some serving GPUs are handed over for good.

    places: who takes a turn (cluster.py), and router, where that is others' to say. is_ahead: rollouts are one step
    ahead of training. is_whole: what is lent is a whole GPU; is_elsewhere: it is none that serves. puts_tails_off:
    steps are made of what is short, and now and then of what is long. suits: turns begin where hardware suits them.
    """

    text: str
    lender: Callable[[], Lender] = Nobody
    policy: Policy | None = None
    places: str = "home"
    router: Callable[[], Router] = Affine
    keeps_tokens: bool = True
    is_ahead: bool = False
    is_static: bool = False
    serving_chunk: int = 2048
    lent_places: float = 1.0
    is_whole: bool = False
    is_elsewhere: bool = False
    puts_tails_off: bool = False
    suits: bool = True

    @property
    def has_bound(self) -> bool:
        """True if no step's rollouts can be shorter than what its work, on GPUs as they are, takes at least."""
        return not (self.is_ahead or self.is_static or self.is_elsewhere or self.puts_tails_off)

    @property
    def can_share(self) -> bool:
        """True if it has a rule for several runs: production's plan. Others' rules know one."""
        is_ours = type(self.lender()) in (Nobody, Planned)
        return is_ours and self.places != "routed" and not self.puts_tails_off

    @property
    def lends(self) -> bool:
        """True if serving GPUs ever run rollouts."""
        return self.lender is not Nobody


ARMS: dict[str, Arm] = {
    "fixed": Arm(text="dedicated GPUs alone, synchronous steps"),
    "async": Arm(text="dedicated GPUs alone, rollouts one step ahead of training", is_ahead=True),
    "static": Arm(text="some serving GPUs handed to rollouts for good", is_static=True),
    "share-all": Arm(text="all serving GPUs lent for good, no guard", lender=Always, policy=unguarded),
    "idle-only": Arm(
        text="a rollout step only while serving has no request",
        lender=lambda: WholeSteps(yields=True),
        policy=idle_only,
    ),
    "rose": Arm(
        text="ROSE as published: lent for whole steps, slack test, one 2x cut, cache-affine, abort and run again",
        lender=lambda: WholeSteps(cuts_memory=True),
        policy=rose,
        places="routed",
        keeps_tokens=False,
        serving_chunk=SMALL_CHUNK,
    ),
    "by-length": Arm(
        text="dedicated GPUs alone; the longest trajectories first, which take others' slots: after Heddle",
        places="routed",
        router=ByLength,
    ),
    "levels": Arm(
        text="dedicated GPUs alone; a bucket of GPUs for trajectories that go on for long: after Libra",
        places="routed",
        router=Levels,
    ),
    "tails": Arm(
        text="dedicated GPUs alone; short rounds, and what is long together later: after RollPacker",
        puts_tails_off=True,
    ),
    "elastic": Arm(
        text="whole serving GPUs, borrowed where a step gains more than a move costs: after PEARL",
        lender=Elastic,
        policy=unguarded,
        is_whole=True,
    ),
    "spot": Arm(
        text="as many further GPUs as serve, which come cold and go as spot instances do: after RLBoost",
        lender=Spot,
        policy=unguarded,
        is_whole=True,
        is_elsewhere=True,
    ),
    "ours": Arm(text="production's rules as they are by default", lender=Planned),
    "ours-few": Arm(
        text="ours, with a quarter as many trajectories under way for slots that may be lent",
        lender=Planned,
        lent_places=0.25,
    ),
    "ours-advised": Arm(
        text="ours, where serving's router follows the advice", lender=lambda: Planned(is_followed=True)
    ),
    "no-affinity": Arm(text="ours, and the run asks for no prefix affinity", lender=Planned, places="shared"),
    "no-hardware": Arm(text="ours; all hardware is taken to be alike", lender=Planned, suits=False),
    "no-move": Arm(text="ours; turns never leave in the middle", lender=lambda: Planned(drains=True)),
    "no-reserve": Arm(text="ours; no reserve for arrivals", lender=Planned, policy=no_reserve),
    "no-pace": Arm(text="ours; the whole pace is used up", lender=Planned, policy=no_pace),
    "ours-tails": Arm(
        text="ours-advised, whose trainer puts tails off as RollPacker does",
        lender=lambda: Planned(is_followed=True),
        puts_tails_off=True,
    ),
    "ours-async": Arm(text="ours, rollouts one step ahead", lender=Planned, is_ahead=True),
}
