"""`rollfab bench saving`: what a long turn costs the broker while it runs, whose tokens are saved twice a second.

- A turn is claimed on a private broker, and saved every STEP_TOKENS tokens as a worker does it: in parts
  (fabric/rules/queue/token_parts.py), and, in a fabric of its own, whole every time. With experts, it notes beside each
  token which of a model's experts made it.
- The floor is what there is to be saved: the bytes of every token once.
- At the end the turn is taken back and claimed by another worker, which must get every token that was saved.

Exit code 1 when it got others.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import numpy as np
from redis.asyncio import Redis

from rollfab.deploy.replay.figures import Report, number, show
from rollfab.fabric.broker.embedded import EmbeddedBroker
from rollfab.fabric.contract.records import Side, TokenLog
from rollfab.fabric.opened import RedisFabric
from rollfab.fabric.ports.queue import TurnClaim, TurnProgress
from rollfab.workers.engines.base import Generation
from rollfab.workers.rollout.turns import RunningTurn

from ..queue.life import LEASE_EPOCH, WORKER_ID, new_group, new_turn, open_run

RUN_ID, AGENT = "bench-saving", "bench-agent"
STEP_TOKENS = 25  # in half a second, at 50 tokens a second
LAYER_COUNT = 48
PARTS, WHOLE = "in parts", "whole"


@dataclass(frozen=True, kw_only=True)
class Turn:
    """token_count: that it makes. expert_count: noted of each token in each layer; 0: none."""

    token_count: int
    expert_count: int = 0

    @property
    def bytes_per_token(self) -> int:
        """An id, a log-probability, and the experts."""
        return 8 + LAYER_COUNT * self.expert_count


@dataclass(frozen=True, kw_only=True)
class Settings:
    """round_count: of each turn in each way, in turn."""

    turns: tuple[Turn, ...]
    round_count: int


FULL = Settings(
    turns=(
        Turn(token_count=1_000),
        Turn(token_count=8_000),
        Turn(token_count=32_000),
        Turn(token_count=8_000, expert_count=8),
    ),
    round_count=3,
)
QUICK = Settings(turns=(Turn(token_count=2_000), Turn(token_count=1_000, expert_count=2)), round_count=1)


async def measure(settings: Settings) -> Report:
    """Measure every turn in both ways."""
    rows: list[dict[str, Any]] = []
    for turn in settings.turns:
        found: dict[str, list[dict[str, float]]] = {PARTS: [], WHOLE: []}
        for _ in range(settings.round_count):
            for way, each in found.items():
                each.append(await _measure(turn, in_parts=way == PARTS))
        row = {way: {name: median(round_[name] for round_ in each) for name in each[0]} for way, each in found.items()}
        rows.append({**asdict(turn), "floor_bytes": turn.token_count * turn.bytes_per_token, **row})
    last = max(rows, key=lambda row: (not row["expert_count"], row["token_count"]))
    return Report(
        name="saving",
        params={"settings": asdict(settings)},
        results={"rows": rows, "wrong_count": sum(row[way]["wrong_count"] for row in rows for way in (PARTS, WHOLE))},
        baselines={WHOLE: [row[WHOLE] for row in rows], "floor_bytes": [row["floor_bytes"] for row in rows]},
        ratio={name: last[WHOLE][name] / last[PARTS][name] for name in ("bytes", "broker_cpu_s")},
    )


def faults(report: Report) -> list[str]:
    """Tell whether every token was there in the end."""
    count = report.results["wrong_count"]
    return [f"{count:.0f} turns went on elsewhere with other tokens than were saved"] if count else []


async def _measure(turn: Turn, *, in_parts: bool) -> dict[str, float]:
    with EmbeddedBroker.start() as broker:
        async with (
            await RedisFabric.open(broker.url, client_name="bench") as fabric,
            Redis.from_url(broker.url) as direct,
        ):
            run = await open_run(fabric, RUN_ID)
            await fabric.rollouts(run).push([new_group(1)])
            (trajectory,) = await fabric.trajectories(run).claim(AGENT, 1)
            turns = fabric.turns(run)
            assert not any(await turns.push(AGENT, [new_turn(trajectory, 0, AGENT)]))

            async def claimed() -> TurnClaim:
                return (await turns.exchange(WORKER_ID, want=1, lease_epoch=LEASE_EPOCH)).claims[0]

            running = RunningTurn.begin(await claimed(), WORKER_ID, 0.0, number=1)
            made = _made(turn)
            before = await _spent(direct)
            for count in range(STEP_TOKENS, turn.token_count + 1, STEP_TOKENS):
                outcome = await turns.exchange(WORKER_ID, progress=[running.renewal(_first(made, count), count)])
                running.note_saved(in_parts and bool(outcome.saved))
            after = await _spent(direct)
            await turns.release(WORKER_ID, [TurnProgress(claim=running.claim)])
            got = (await claimed()).log
            is_right = got is not None and _is_first(got, made, count)
    spent = {name: after[name] - before[name] for name in before}
    return {**spent, "bytes_per_token": spent["bytes"] / count, "wrong_count": float(not is_right)}


def _made(turn: Turn) -> Generation:
    """All that the turn will have made."""
    dice, count = np.random.default_rng(7), turn.token_count
    experts = dice.integers(0, 128, (count, LAYER_COUNT, turn.expert_count), dtype=np.uint8)
    return Generation(
        request_id="bench",
        completion_ids=dice.integers(0, 150_000, count, dtype=np.int32),
        logprobs=-dice.random(count, dtype=np.float32),
        versions=((0, count, 0),),
        sides=(Side(name="routed_experts", start=0, end=count, array=experts),) if turn.expert_count else (),
    )


def _first(made: Generation, count: int) -> Generation:
    """What an engine tells when so many tokens are made."""
    return replace(
        made,
        completion_ids=made.completion_ids[:count],
        logprobs=made.logprobs[:count],
        versions=((0, count, 0),),
        sides=tuple(part for side in made.sides if (part := side.part(0, count)) is not None),
    )


def _is_first(got: TokenLog, made: Generation, count: int) -> bool:
    """Whether they are the first `count` tokens, and what was noted of them."""
    told = {side.name: side.array for side in got.sides}
    return np.array_equal(got.completion_ids, made.completion_ids[:count]) and all(
        side.name in told and np.array_equal(told[side.name], side.array[:count]) for side in made.sides
    )


async def _spent(direct: Redis) -> dict[str, float]:
    """What the broker has read and computed so far."""
    found = await direct.info()
    return {
        "bytes": float(found["total_net_input_bytes"]),
        "broker_cpu_s": found["used_cpu_user"] + found["used_cpu_sys"],
    }


def print_table(report: Report) -> None:
    found = json.loads(report.json())
    rows = []
    for row in found["results"]["rows"]:
        beside = f", {row['expert_count']} experts a layer" if row["expert_count"] else ""
        cells = [f"{number(row[way]['bytes_per_token'])} B, {row[way]['broker_cpu_s']:.2f} s" for way in (PARTS, WHOLE)]
        floor = number(row["floor_bytes"] / row["token_count"])
        rows.append([f"{row['token_count']:,} tokens{beside}", *cells, f"{floor} B"])
    ratio = found["ratio"]
    notes = [
        f"whole over in parts, in the longest without experts: {number(ratio['bytes'])} times the bytes, "
        f"{number(ratio['broker_cpu_s'])} times the broker's CPU",
        f"machine: {found['machine']}",
    ]
    show(
        "rollfab bench saving: bytes to the broker for each token made, and its CPU",
        ["", PARTS, WHOLE, "floor"],
        rows,
        notes,
    )
