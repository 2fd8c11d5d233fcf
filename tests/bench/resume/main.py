"""`rollfab bench resume`: turns that are taken from one worker in the middle, and go on at another.

- `handover_ms`: from the call that ends a worker's lease until the first new token of a turn at the other worker, for
  every turn that it held. It has in it: that the worker learns of it, gives its tokens back, that the other one hears
  of it, takes the turn, computes its whole context once (`prefill_ms`, measured apart: a turn with as long a context,
  alone on an idle worker) and samples a token.
- `kill_handover_ms`: the same from SIGKILL on. Nobody says that the worker is gone, so its claims have to end first.
- `exact`: whether every turn that was interrupted has the very tokens of one that was not. Turns are greedy; the same
  prompts run again, uninterrupted, once all hand-overs are measured.
- `tokens_regenerated`: tokens that engines made beyond those of the results: 0 where a lease ended, and what was not
  yet saved where a worker was killed.
- `token_log_overhead_fraction`: see bench/token_log.py.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rollfab.deploy.replay.figures import Report, number, percentile, show

from ..token_log import LogSettings, measure_token_log
from .asker import PROMPT_TOKENS, Turns, greedy
from .stage import WORKERS, Stage

SEED = 3
TURNS_TOGETHER = 4
COMPLETION_TOKENS = 440  # as many as the tiny preset has positions for
REVOKE_AFTER_S = (0.02, 0.25)  # of the first token: some turns are hardly begun, others nearly done
PREFILL_TOKENS = PROMPT_TOKENS + COMPLETION_TOKENS // 2
QUIET_S = 0.02  # so long after a result all that engines have made is written down


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How much is measured. At least so many turns handed over when leases end; workers killed so many times."""

    handover_count: int
    kill_count: int
    prefill_count: int
    log: LogSettings


FULL = Settings(
    handover_count=200,
    kill_count=5,
    prefill_count=40,
    log=LogSettings(round_count=12, turn_count=32, completion_tokens=440),
)
QUICK = Settings(
    handover_count=30,
    kill_count=1,
    prefill_count=8,
    log=LogSettings(round_count=3, turn_count=32, completion_tokens=128),
)


@dataclass(frozen=True, kw_only=True)
class HandOver:
    """One turn that went from one worker to another. prior_count: tokens it came with."""

    turn: str
    handover_ms: float
    prior_count: int


def faults(report: Report) -> list[str]:
    """Tell whether a turn did not go on exactly."""
    count = report.results["inexact_turns"]
    return [f"{count} interrupted turns have other tokens than uninterrupted ones (seed {SEED})"] if count else []


async def measure(settings: Settings) -> Report:
    """Hand-overs, then the token log's cost.

    Raises:
        FabricError: a process of the bench does not work, or a turn never came.
    """
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rollfab-resume-", ignore_cleanup_errors=True) as name:
        async with Stage(Path(name), SEED) as stage:
            results = await _measure_handovers(stage, settings)
    results |= await measure_token_log(settings.log)
    results["wall_s"] = time.monotonic() - started_s
    params = {"settings": asdict(settings), "turns_together": TURNS_TOGETHER, "seed": SEED}
    return Report(name="resume", params=params, results=results, baselines={}, ratio={})


async def _measure_handovers(stage: Stage, settings: Settings) -> dict[str, Any]:
    prefills = [value for _ in range(settings.prefill_count) for value in await _prefill_ms(stage)]
    dice = np.random.default_rng(SEED)
    revoked, turns, revoked_waste = await _revoke_until(stage, settings.handover_count, dice)
    killed, killed_turns, killed_waste = [], [], 0
    for index in range(settings.kill_count):
        if index:
            await stage.restart()
        found, of_kill, waste = await _interrupt(stage, dice, is_kill=True)
        killed += found
        killed_turns.append(of_kill)
        killed_waste += waste
    inexact = [name for each in [*turns, *killed_turns] for name in await _differing(stage, each)]
    interrupted = {each.turn for each in [*revoked, *killed]}
    return {
        **_summary("handover", revoked),
        **_summary("kill_handover", killed),
        "prefill_ms_p50": percentile(prefills, 0.5) if prefills else None,
        "prefill_ms_p99": percentile(prefills, 0.99) if prefills else None,
        "exact": not interrupted & set(inexact),
        "distinct_tokens_min": min(_distinct_counts([*turns, *killed_turns])),
        "inexact_turns": len(interrupted & set(inexact)),
        "tokens_regenerated": revoked_waste,
        "tokens_regenerated_after_kill": killed_waste,
        "tokens_handed_over": sum(each.prior_count for each in revoked),
    }


async def _revoke_until(stage: Stage, count: int, dice: np.random.Generator) -> tuple[list[HandOver], list[Turns], int]:
    found: list[HandOver] = []
    turns: list[Turns] = []
    waste = 0
    while len(found) < count:
        more, asked, wasted = await _interrupt(stage, dice, is_kill=False)
        found += more
        turns.append(asked)
        waste += wasted
    return found, turns, waste


async def _interrupt(stage: Stage, dice: np.random.Generator, *, is_kill: bool) -> tuple[list[HandOver], Turns, int]:
    """Ask for some turns, take them away from the worker that has them, and wait for their results.

    A killed worker stays away until `Stage.restart`.

    Returns:
        The hand-overs, the turns with their results, and how many tokens were made for nothing.
    """
    made_before = stage.token_count()
    turns = await stage.asker.ask(stage.asker.prompts(TURNS_TOGETHER), greedy(COMPLETION_TOKENS))
    giver = await stage.started(turns)
    await asyncio.sleep(dice.uniform(*REVOKE_AFTER_S))
    at_ns = stage.kill(giver) if is_kill else await stage.revoke(giver)
    await stage.asker.collect(turns)
    if not is_kill:
        await stage.until_counted(made_before + turns.token_count)
    await asyncio.sleep(QUIET_S)
    found = [
        HandOver(turn=line["turn"], handover_ms=(line["first_ns"] - at_ns) / 1e6, prior_count=line["prior_count"])
        for line in stage.first_tokens()
        if line["turn"] in turns.prompts and line["asked_ns"] > at_ns
    ]
    waste = stage.token_count() - made_before - turns.token_count
    if not is_kill:
        await stage.lend(giver)
    return found, turns, waste


async def _prefill_ms(stage: Stage) -> list[float]:
    """One turn with a long context, alone: from the engine being asked until its first token; none if unseen."""
    turns = await stage.asker.ask(stage.asker.prompts(1, PREFILL_TOKENS), greedy(PREFILL_TOKENS // 4))
    await stage.asker.collect(turns)
    await asyncio.sleep(QUIET_S)
    lines = [line for line in stage.first_tokens() if line["turn"] in turns.prompts]
    return [(line["first_ns"] - line["asked_ns"]) / 1e6 for line in lines]


async def _differing(stage: Stage, turns: Turns) -> list[str]:
    """Turns whose tokens differ from those of the same prompts, uninterrupted."""
    names = list(turns.prompts)
    again = await stage.asker.ask([turns.prompts[name] for name in names], greedy(COMPLETION_TOKENS))
    await stage.asker.collect(again)
    return [
        name
        for name, other in zip(names, again.prompts, strict=True)
        if not np.array_equal(turns.results[name].completion_ids, again.results[other].completion_ids)
    ]


def _distinct_counts(turns: Sequence[Turns]) -> list[int]:
    """Different tokens in each result: turns of one repeated token would be equal whatever they went on from."""
    return [len(set(each.completion_ids.tolist())) for some in turns for each in some.results.values()]


def _summary(name: str, found: Sequence[HandOver]) -> dict[str, Any]:
    values = [each.handover_ms for each in found]
    return {
        f"{name}_count": len(values),
        f"{name}_ms_p50": percentile(values, 0.5) if values else None,
        f"{name}_ms_p99": percentile(values, 0.99) if values else None,
    }


def print_table(report: Report) -> None:
    found = report.results
    rows = [
        [label, str(found[f"{key}_count"]), number(found[f"{key}_ms_p50"]), number(found[f"{key}_ms_p99"]), wasted]
        for label, key, wasted in (
            ("its worker's lease ended", "handover", str(found["tokens_regenerated"])),
            ("its worker was killed", "kill_handover", str(found["tokens_regenerated_after_kill"])),
        )
    ]
    low, high = found["token_log_overhead_quartiles"]
    notes = [
        f"one prefill p50 {number(found['prefill_ms_p50'] or 0)} ms, p99 {number(found['prefill_ms_p99'] or 0)} ms;"
        f" interrupted turns exact: {'yes' if found['exact'] else 'NO'}",
        f"token log: {found['token_log_overhead_fraction']:.2%} of tokens/s (quartiles {low:.2%} and {high:.2%}),"
        f" {found['token_log_loop_cpu_fraction']:.2%} of a core",
        f"{found['wall_s']:.0f} s in all, workers {' and '.join(WORKERS)}; machine: {report.machine}",
    ]
    columns = ["turn handed over because", "turns", "first token elsewhere p50, ms", "p99", "tokens made again"]
    show("rollfab bench resume", columns, rows, notes)
