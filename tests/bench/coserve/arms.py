"""One round: one arm, one replay, what the clients saw and what the rollout workers made meanwhile.

- An arm is a policy of the guard, a priority of the lent engine, and whether it is lent at all. Nothing is restarted.
- A repetition is cut into slices, and arms alternate slice by slice: a machine that is half as fast for half a minute,
  as shared ones are, then spoils some slices of every arm, and not all of one.
- A slice begins once the arm is in force and has served some requests, so that nobody is judged by a change.
- A slice in which the hypervisor kept the processors from this machine is measured again, whatever the arm and whatever
  came of it, some times at most; the one that lost least counts.
- A repetition in which serving alone misses its objectives says nothing of a guard: it is measured again, some times at
  most, and reported apart.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollfab.deploy.replay.figures import percentile
from rollfab.deploy.replay.records import Arrival, Outcome
from rollfab.fabric.contract.errors import FabricError
from rollfab.fabric.rules.serving.facts import Slo

from ..stolen import stolen_s
from .cast import BORROWED, DEDICATED, Made, Pair
from .figures import ALONE, Round, latencies_ms, merged
from .load import traffic
from .places import NORMAL, engine_pid, priorities, restore, set_priority
from .policies import NAMES, OWN_PRIORITY
from .switch import Profile, Switch

log = logging.getLogger(__name__)

LEAD_S = 0.3  # from announcing a replay to its first second
WARM_S = 2.0
SETTLE_TIMEOUT_S = 60.0  # what was taken back for serving rests for a while
QUIET_S = 0.3  # without a step for so long: it stands still
REPLAY_TIMEOUT_S = 600.0
MOVES = ("stalled", "released")  # turns that go on elsewhere: taken over, or given back
WARM_SEED = 1_000_003  # never a repetition's


SLICES_MAX = 64  # of a repetition: no two slices of a measurement have the same arrivals
STOLEN_MAX = 0.005  # of the processors' time: five times the usual here; clusters of gaps take some hundredths
AGAIN_MAX = 3  # times that a slice is measured again


@dataclass(frozen=True, kw_only=True)
class Load:
    """Of one arm in one repetition, which is cut into slices."""

    rate_per_s: float
    request_count: int
    slice_count: int = 1

    def count_of(self, part: int) -> int:
        """Requests of one slice; those of all are request_count."""
        return (self.request_count + part) // self.slice_count


class Rounds:
    """Measures arms on one pair.

    Attributes:
        load: of every round from now on.
    """

    def __init__(self, pair: Pair, load: Load, switch: Switch) -> None:
        self._pair = pair
        self.load = load
        self._switch = switch
        self._own_priorities: dict[int, tuple[int, int]] = {}

    def warm(self) -> None:
        """Some requests that do not count."""
        arrivals = self._arrivals(WARM_SEED, max(1, round(WARM_S * self.load.rate_per_s)))
        start_at_s = time.monotonic() + LEAD_S
        self._switch.announce(arrivals, start_at_s)
        self._replay(arrivals, start_at_s)

    # ---- before anything is shared

    def calibrate(self, repetition: int) -> Round:
        """Serving alone, on the arrivals of a repetition: the worker beside it is not lent.

        Raises:
            FabricError: a request failed.
        """
        found = merged([self._undisturbed(ALONE, repetition, part) for part in range(self.load.slice_count)])
        if found.failures:
            raise FabricError(f"a request to the serving engine failed, with nothing beside it: {found.failures[0]}")
        return found

    def profile(self, prompts: Sequence[int] = (32, 256), count: int = 5) -> Profile:
        """Step times of serving alone, as one would profile them offline: one request at a time."""
        ttft_s: dict[int, float] = {}
        step_s: list[float] = []
        for tokens in prompts:
            arrivals = [Arrival(at_s=0.5 * index, prompt_tokens=tokens, completion_tokens=16) for index in range(count)]
            outcomes = self._replay(arrivals, time.monotonic() + LEAD_S)
            ttft_s[tokens] = percentile([each.ttft_s or 0.0 for each in outcomes], 0.5)
            step_s += [each.tpot_s or 0.0 for each in outcomes]
        short, long = prompts
        slope = (ttft_s[long] - ttft_s[short]) / (long - short)
        return Profile(prefill_s_per_token=max(slope, 0.0), step_s=percentile(step_s, 0.5))

    def borrow(self, slo: Slo) -> None:
        """Start the worker that is lent."""
        self._pair.borrow(slo)
        self._own_priorities = priorities(engine_pid(self._pair.pid(BORROWED)))

    # ---- rounds

    def slice(self, arm: str, repetition: int, part: int = 0) -> Round:
        """One arm, in force before the first request. Raises FabricError: it did not come into force."""
        self.enter(arm)
        return self._undisturbed(arm, repetition, part)

    def enter(self, arm: str) -> None:
        """Put an arm into force, and serve some requests under it."""
        pair = self._pair
        self._switch.set_arm(NAMES.index(arm))
        self._set_priority(arm)
        if arm == ALONE:
            pair.lend("off")
            pair.until(self._stands_still, SETTLE_TIMEOUT_S, "the lent engine to stand still")
        else:
            pair.lend("on")
            self._wait_for_steps(arm)
        self.warm()

    def replay(self, arrivals: Sequence[Arrival]) -> tuple[float, list[Outcome]]:
        """Any other arrivals, under the arm in force: when they began (monotonic seconds), and what came of them."""
        start_at_s = time.monotonic() + LEAD_S
        self._switch.announce(arrivals, start_at_s)
        return start_at_s, self._replay(arrivals, start_at_s)

    def _wait_for_steps(self, arm: str) -> None:
        """An arm that shares by rule may well decide not to: then it harvests nothing, which is what it is."""
        try:
            self._pair.until_it_steps(SETTLE_TIMEOUT_S)
        except FabricError as error:
            self._pair.check()
            if arm not in OWN_PRIORITY:
                raise
            log.warning("coserve.not_lent", extra={"arm": arm, "error": str(error)})

    def _set_priority(self, arm: str) -> None:
        """Before it is lent: what the product asks for, or none."""
        if arm in OWN_PRIORITY:
            restore(self._own_priorities)
        elif arm != ALONE:
            set_priority(engine_pid(self._pair.pid(BORROWED)), NORMAL)

    def _stands_still(self) -> bool:
        return time.monotonic() - self._pair.last_step_s > QUIET_S

    def _arrivals(self, seed: int, count: int) -> list[Arrival]:
        return traffic(
            seed, rate_per_s=self.load.rate_per_s, count=count, context_tokens=self._pair.sizes.context_tokens
        )

    def _undisturbed(self, arm: str, repetition: int, part: int) -> Round:
        return least_disturbed(lambda: self._measure(arm, repetition, part))

    def _measure(self, arm: str, repetition: int, part: int) -> Round:
        pair = self._pair
        arrivals = self._arrivals(SLICES_MAX * repetition + part, self.load.count_of(part))
        start_at_s = time.monotonic() + LEAD_S
        self._switch.announce(arrivals, start_at_s)
        counters, before, shared = pair.demand.counters(), self._made(), self._shared()
        began_s, stolen_before_s = time.monotonic(), stolen_s()
        outcomes = self._replay(arrivals, start_at_s)
        stolen_fraction = (stolen_s() - stolen_before_s) / (os.cpu_count() or 1) / (time.monotonic() - began_s)
        after, now = self._made(), pair.demand.counters()
        pair.check()
        latencies = latencies_ms(outcomes)
        return Round(
            arm=arm,
            repetition=repetition,
            ttft_ms=latencies["ttft_ms"],
            tpot_ms=latencies["tpot_ms"],
            duration_s=max(each.ended_at_s for each in outcomes),
            late_ms_max=1000 * max(each.late_s for each in outcomes),
            dedicated_per_s=rate(before[DEDICATED], after[DEDICATED]) if DEDICATED in before else 0.0,
            borrowed_per_s=rate(before[BORROWED], after[BORROWED]) if BORROWED in before else 0.0,
            reclaim_ms=self._switch.reclaims_ms(),
            failures=tuple(f"{each.error}: {each.detail}" for each in outcomes if each.error),
            turns_moved=sum(now.get(name, 0) - counters.get(name, 0) for name in MOVES),
            guard=self._guard(shared) if shared else {},
            stolen_fraction=stolen_fraction,
        )

    def _shared(self) -> dict[str, Any]:
        """What sharing was, since the worker started."""
        return self._pair.guard_text().get("sharing") or {} if self._own_priorities else {}

    def _guard(self, before: dict[str, Any]) -> dict[str, Any]:
        """What the guard says, and how long in this round it was lent, and rollouts computed."""
        now = self._shared()
        passed = {name: now.get(name, 0.0) - before.get(name, 0.0) for name in ("lent_s", "computing_s")}
        return {**self._pair.guard_text().get("view", {}), **passed}

    def _replay(self, arrivals: Sequence[Arrival], start_at_s: float) -> list[Outcome]:
        outcomes: list[Outcome] = self._pair.client.call("replay", arrivals, start_at_s, timeout_s=REPLAY_TIMEOUT_S)
        if len(outcomes) != len(arrivals):
            raise FabricError(f"{len(outcomes)} outcomes came of {len(arrivals)} requests: this is no open loop")
        return outcomes

    def _made(self) -> dict[str, Made]:
        roles = [role for role in (DEDICATED, BORROWED) if role in self._pair.supervisor.children]
        return {role: self._pair.made(role) for role in roles}


def least_disturbed(measure: Callable[[], Round]) -> Round:
    """The first slice that lost at most STOLEN_MAX, or of 1 + AGAIN_MAX the one that lost least."""
    found = [measure()]
    while found[-1].stolen_fraction > STOLEN_MAX and len(found) <= AGAIN_MAX:
        found.append(measure())
    return replace(min(found, key=lambda each: each.stolen_fraction), again_count=len(found) - 1)


def rate(before: Made, after: Made) -> float:
    """Tokens per second between two heartbeats."""
    passed_s = after.at_s - before.at_s
    return (after.token_count - before.token_count) / passed_s if passed_s > 0 else 0.0


def interleaved(
    rounds: Rounds,
    arms: Sequence[str],
    repetitions: int,
    *,
    slo: Slo,
    spoiled_max: int = 0,
    tell: Callable[[Round], Any] = lambda _: None,
) -> tuple[list[Round], list[Round]]:
    """All arms, slice by slice, each cycle beginning with another one.

    Returns:
        found: by repetition and arm. spoiled: those measured again, at most `spoiled_max` repetitions of them.
    """
    found: list[Round] = []
    spoiled: list[Round] = []
    for repetition in range(1, repetitions + 1):
        while True:
            measured = _repetition(rounds, arms, repetition)
            for each in measured:
                tell(each)
            is_spoiled = any(each.arm == ALONE and not each.is_within(slo) for each in measured)
            if not is_spoiled or len(spoiled) >= spoiled_max * len(arms):
                break
            spoiled += measured
        found += measured
    return found, spoiled


def _repetition(rounds: Rounds, arms: Sequence[str], repetition: int) -> list[Round]:
    parts: dict[str, list[Round]] = {arm: [] for arm in arms}
    for part in range(rounds.load.slice_count):
        shift = (repetition + part - 1) % len(arms)
        for arm in [*arms[shift:], *arms[:shift]]:
            parts[arm].append(rounds.slice(arm, repetition, part))
    return [merged(each) for each in parts.values()]
