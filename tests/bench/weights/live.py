"""From the optimiser's end until the weights are live: ours and dense, by turns, with one receiver and with several.

- A trainer process, a broker, receiver processes; all on this machine, over a local socket.
- Every round publishes the next recorded state, first ours, then dense; live is when the last receiver has it. Both
  must have brought the same bits.
- The broker keeps no log on disk in this arm: it would cost dense more than ours.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from rollfab.fabric.broker.embedded import EmbeddedBroker
from rollfab.fabric.contract.errors import FabricError

from ..remote import Remote
from .roles import LiveReceiver, LiveTrainer

CALL_S = 300.0
READY_S = 180.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """receiver_counts: in the order measured, ascending. round_count: of each, after one that does not count. first:
    version to begin with."""

    receiver_counts: tuple[int, ...]
    round_count: int
    first: int


@dataclass(frozen=True, kw_only=True)
class Round:
    """One state, brought live in both ways. stage_s, pause_s, copy_s: by receiver; copy_s is a dense copy's."""

    receiver_count: int
    ours_s: float
    dense_s: float
    encode_s: float
    payload_bytes: float
    stage_s: list[float]
    pause_s: list[float]
    copy_s: list[float]


def measure_live(directory: Path, recording: Path, settings: Settings, say: Callable[[str], None]) -> list[Round]:
    """All rounds.

    Args:
        directory: for the broker and logs.
        recording: of as many changes as there are rounds and one for each number of receivers, from `settings.first`.
        say: told what happens.

    Raises:
        FabricError: a process ended, or the two ways brought different weights.
    """
    rounds: list[Round] = []
    with ExitStack() as stack:
        broker = stack.enter_context(EmbeddedBroker.start(directory / "live-broker"))
        without_log(broker.url)

        def start(name: str, role: type[Any], version: int) -> Remote:
            log = directory / f"{name}.log"
            return stack.enter_context(Remote(name, log, role, broker.url, recording, version))

        trainer = start("the trainer", LiveTrainer, settings.first)
        trainer.ready(READY_S)
        trainer.call("publish_first", timeout_s=CALL_S)
        receivers: list[Remote] = []
        version = settings.first
        for count in settings.receiver_counts:
            new = [start(f"receiver {index}", LiveReceiver, version) for index in range(len(receivers), count)]
            for receiver in new:
                receiver.ready(READY_S)
            receivers += new
            for index in range(1 + settings.round_count):
                last = _round(trainer, receivers)
                version += 1
                if index:  # the first round of a process loads compiled code and touches fresh memory
                    rounds.append(last)
                    say(f"live with {count}: ours {last.ours_s:.2f} s, dense {last.dense_s:.2f} s")
    return rounds


def _round(trainer: Remote, receivers: Sequence[Remote]) -> Round:
    with ThreadPoolExecutor(len(receivers)) as pool:

        def everywhere(method: str) -> list[Any]:
            return list(pool.map(lambda receiver: receiver.call(method, timeout_s=CALL_S), receivers))

        trainer.call("train", timeout_s=CALL_S)
        waiting = [pool.submit(receiver.call, "follow", timeout_s=CALL_S) for receiver in receivers]
        time.sleep(0.05)  # until they wait, as receivers do
        published = trainer.call("publish", timeout_s=CALL_S)
        ours = [each.result() for each in waiting]
        copies = everywhere("copy_dense")
        waiting = [pool.submit(receiver.call, "follow_dense", timeout_s=CALL_S) for receiver in receivers]
        time.sleep(0.05)
        dense_started_s = trainer.call("publish_dense", timeout_s=CALL_S)
        dense = [each.result() for each in waiting]
        if not all(everywhere("agrees")):
            raise FabricError("the two ways brought different weights")
    return Round(
        receiver_count=len(receivers),
        ours_s=max(each["live_s"] for each in ours) - published["started_s"],
        dense_s=max(dense) - dense_started_s,
        encode_s=published["encode_s"],
        payload_bytes=published["payload_bytes"],
        stage_s=[each["stage_s"] for each in ours],
        pause_s=[each["pause_s"] for each in ours],
        copy_s=copies,
    )


def without_log(url: str) -> None:
    """Have the broker write nothing to disk."""
    with redis.Redis.from_url(url) as client:
        client.config_set("appendonly", "no")
