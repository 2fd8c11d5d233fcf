"""A whole fabric of real processes for tests: a private broker, a supervisor, a client, and what must hold."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from redis import Redis

import rollfab
from rollfab.deploy.local.supervisor import Supervisor
from rollfab.fabric.broker.embedded import EmbeddedBroker
from rollfab.fabric.contract.records import DeadLetter, Group, Rollout, WorkerInfo
from rollfab.fabric.model.tokenizer import CharTokenizer
from rollfab.fabric.opened import RedisFabric
from rollfab.fabric.queue.keys import ShardKeys
from rollfab.trainer.client import Run
from tests.bench.lively import lively_weights
from tests.support.brokers.key_table import unaccounted
from tests.support.until import wait_until

ROOT = Path(__file__).parents[3]
PYTHONPATH = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
KEPT_KEYS = {
    "run",
    "clock",
    "counters",
    "rewards",
    "lengths",
    "timings",
    "leases",
    "lease_slots",
    "lease_term",
    "consumed",
    "consumers",
    "dead",
    "completed",
    "kept",
}  # of a done run

T = TypeVar("T")


class Processes:
    """Roles as child processes, restarted when they die, and a client to the broker they share."""

    def __init__(self, directory: Path) -> None:
        self.broker = EmbeddedBroker.start(directory / "broker")
        self.url = self.broker.url
        self.supervisor = Supervisor(directory / "logs")
        self.fabric = rollfab.connect(self.url)
        self.redis = Redis.from_url(self.url)

    def start(self, name: str, role: str, *words: str) -> None:
        """Start a role under a name for this test; the worker's own name is new with every start."""
        place = {"PYTHONPATH": PYTHONPATH, "ROLLFAB_URL": self.url}
        self.supervisor.add(name, [role, *words], environment=place)

    def start_roles(self, *, agent: Iterable[str] = (), worker: Iterable[str] = ()) -> None:
        """A controller, an agent and a dedicated worker; ready once each is known to the broker."""
        self.start("controller", "controller", "--name", "controller")
        self.start("agent", "agent", *agent)
        self.start("dedicated", "worker", *worker)
        self.wait_for_role("controller", "agent", "dedicated")

    def wait_for_role(self, *names: str, timeout_s: float = 60.0) -> None:
        """Wait until these children, and not some earlier ones, are known to the broker and have loaded."""
        for name in names:
            self.until(lambda name=name: self._is_up(name), timeout_s, f"{name} is known to the broker, and up")

    def _is_up(self, name: str) -> bool:
        info = self.worker_of(name)
        return info is not None and info.state != "loading"

    def worker_of(self, name: str) -> WorkerInfo | None:
        """What the broker knows of the worker that runs in a child."""
        pid = self.supervisor.children[name].pid
        workers = self.ask(lambda ports: ports.board.workers())
        return next((info for info, _ in workers.values() if info.pid == pid), None)

    def kill(self, *names: str) -> None:
        """Kill children, once all of them run, and wait until they are gone: what is asked next, successors answer."""
        children = [self.supervisor.children[name] for name in names]
        self.until(lambda: all(child.is_running for child in children), 60.0, f"{' and '.join(names)} run")
        for child in children:
            assert child.process is not None
            child.process.kill()
            child.process.wait()

    def until(self, condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
        """Poll, restarting children that died; returns what the condition said."""

        def met() -> Any:
            said = condition()
            if not said:
                self.supervisor.watch()
            return said

        return wait_until(met, lambda: f"{what}\n{self.logs()}", timeout_s)

    def ask(self, question: Callable[[RedisFabric], Awaitable[T]]) -> T:
        """Ask the ports themselves something."""

        async def main() -> T:
            async with await RedisFabric.open(self.url, client_name="test") as ports:
                return await question(ports)

        return asyncio.run(main())

    def lend(self, value: str) -> None:
        """The serving team's switch, for all serving workers."""
        self.ask(lambda ports: ports.board.set_lend("*", value))

    def dead_letters(self, run: Run) -> dict[str, DeadLetter]:
        """Dead letters by trajectory."""
        letters = self.ask(lambda ports: ports.rollouts(run.config).dead_letters(1000))
        return {letter.trajectory_id: letter for letter in letters}

    def new_run(self, run_id: str, environment: str, *, is_lively: bool = False, **settings: Any) -> Run:
        """A run of the tiny model with version 0 published; lively: whose every token hangs on all before it."""
        run = self.fabric.run(run_id, model="tiny", environment=environment, **settings)
        run.publish(lively_weights() if is_lively else tiny_weights(), version=0)
        return run

    def collect(self, run: Run, group_count: int, timeout_s: float) -> list[Group]:
        """Consume groups, restarting children that died, until there are enough."""
        groups: list[Group] = []

        def take() -> bool:
            groups.extend(run.groups(timeout=0.05))
            return len(groups) >= group_count

        self.until(take, timeout_s, f"{group_count} groups of {run.run_id} arrived")
        groups.extend(run.groups(timeout=0.3))  # one too many would come now; this also acknowledges the last
        return groups

    def claimed_by(self, run: Run, name: str) -> int:
        """Turns that a child's worker holds."""
        info = self.worker_of(name)
        keys = ShardKeys(run.run_id, 0)
        return int(self.redis.hget(keys.turn.held, info.worker_id) or 0) if info else 0  # type: ignore[arg-type]

    def logs(self) -> str:
        """The last lines of every child, for failure messages."""
        return "\n".join(f"== {name}\n{child.tail(15)}" for name, child in self.supervisor.children.items())

    def close(self) -> None:
        """End everything, in this order, also when an ending fails."""
        with ExitStack() as ends:
            for end in (self.broker.stop, self.fabric.close, self.supervisor.stop, self.redis.close):
                ends.callback(end)


@contextmanager
def processes(directory: Path) -> Iterator[Processes]:
    """A fabric that ends with the block."""
    fabric = Processes(directory)
    try:
        yield fabric
    finally:
        fabric.close()


@cache
def tiny_weights() -> Mapping[str, np.ndarray]:
    """The tiny model's initial weights, float32: greedy, they write one token again and again, and never end."""
    from rollfab.workers.engines.transformers.model import load_model

    return {name: each.detach().numpy() for name, each in load_model("tiny", "float32", "cpu").named_parameters()}


# ---- what must hold


def check_each_arrived_once(groups: list[Group], group_ids: list[str], group_size: int) -> None:
    """Every submitted group, whole, and none twice."""
    assert sorted(group.group_id for group in groups) == sorted(group_ids)
    for group in groups:
        assert not group.redelivered
        assert group.failures == ()
        names = [rollout.trajectory_id for rollout in group.rollouts]
        assert names == [f"{group.group_id}.{index}" for index in range(group_size)]


def check_rollout(rollout: Rollout) -> None:
    """A rollout's arrays fit each other, and its spans cover what the policy wrote without gap or overlap."""
    mask = rollout.completion_mask.astype(bool)
    assert len(rollout.prompt_ids)
    assert len(rollout.completion_ids) == len(rollout.logprobs) == len(mask)
    covered = np.zeros(len(mask), int)
    for span in rollout.spans:
        assert 0 <= span.start < span.end <= len(mask)
        covered[span.start : span.end] += 1
    assert (covered == mask).all()
    assert np.isfinite(rollout.logprobs).all()
    assert (rollout.logprobs[mask] < 0).all()
    assert (rollout.logprobs[~mask] == 0).all()
    assert len(rollout.info["rewards"]) == rollout.turn_count


def check_walk(rollout: Rollout, turn_count: int) -> None:
    """A rollout of tests.support.worlds.worlds.Walk: all its turns, in order, and the world saw exactly what the
    policy wrote.
    """
    check_rollout(rollout)
    assert rollout.finish_reason == "terminated"
    assert rollout.turn_count == turn_count
    mask = rollout.completion_mask.astype(bool)
    written = CharTokenizer().decode(rollout.completion_ids[mask])
    assert written == "".join(rollout.info["actions"])
    assert int((~mask).sum()) == turn_count - 1  # one letter between two turns


def check_totals(fabric: Processes, run: Run) -> Mapping[str, int]:
    """A run that is done: its totals fit, and nothing is left of it but its name; returns its counters."""
    fabric.until(lambda: not _unsettled(run), 5.0, f"nothing is under way: {_unsettled(run)}")
    counters = run.status().counters
    assert counters["groups_submitted"] == counters["groups_completed"] == counters["groups_consumed"]
    ended = sum(counters.get(f"trajectories_{how}", 0) for how in ("completed", "failed", "cancelled"))
    assert counters["trajectories_submitted"] == ended
    left = leftovers(fabric.redis, run.run_id)
    assert left == {}, left
    assert unaccounted(fabric.redis) == []
    return counters


def _unsettled(run: Run) -> dict[str, Any]:
    status = run.status()
    counts = {**status.trajectories, **status.turns, "depth": status.depth, "waiting": status.groups_waiting}
    return {name: count for name, count in counts.items() if count}


def leftovers(redis: Redis, run_id: str) -> dict[str, int]:
    """Keys of jobs and groups that a finished run still has, with their sizes; not those that are bounded."""
    base = ShardKeys(run_id, 0).base
    sizes = {b"hash": redis.hlen, b"zset": redis.zcard, b"stream": redis.xlen, b"list": redis.llen}
    found: dict[str, int] = {}
    for key in redis.scan_iter(match=base + ":*", count=1000):
        name = key.decode().removeprefix(base + ":")
        is_bounded = name.endswith(":bell") or name.startswith(("inbox:", "kept:", "told:", "turn:bell:"))
        if name not in KEPT_KEYS and not is_bounded:
            found[name] = int(sizes[redis.type(key)](key))  # type: ignore[index,arg-type]
    return {name: size for name, size in found.items() if size}
