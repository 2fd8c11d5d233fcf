"""Members of collective rounds are killed or frozen at random points; every other process must live, and the version be
live within the time that rounds may take.

    python -m tests.fault.weights.collective_kills --kills 2000 --seed 1

A fault befalls one process of a trainer and three workers: the member itself, the process of its round, or its
nursery. It counts when it comes before the version is live everywhere. A trainer that is killed is started again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollfab.fabric.broker.embedded import EmbeddedBroker
from rollfab.fabric.delivery.collective.group import BUILD_STALLS, GRACE_S
from tests.support.processes.kill_members import OPTIONS, Model, digest_of, main
from tests.support.processes.process_groups import children_of

RECEIVERS = ("first", "second", "third")
PUBLISHER = "publisher"
WAIT_S = 90.0  # for anything at all
ROUND_S = OPTIONS.answer_s + (BUILD_STALLS + 1) * OPTIONS.stall_s + GRACE_S  # what one round may take without progress
BOUND_S = ROUND_S + 5.0
FREEZE_S = 2 * OPTIONS.stall_s  # of a trainer, whom the others wait for


class Failed(Exception):
    """A process died that nothing was done to, or a version did not become live."""


class Process:
    """A member and what it says."""

    def __init__(self, world: World, name: str) -> None:
        self.name = name
        self.pipe, theirs = world.nursery.Pipe()
        log_path = str(world.directory / f"{name}.log")
        self.process = world.nursery.Process(target=main, args=(world.url, "run", name, log_path, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.live = -1
        self.said: list[tuple[Any, ...]] = []

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def listen(self) -> None:
        """Take in what it has said."""
        with contextlib.suppress(EOFError, ConnectionResetError):  # it is dead: who may not be is found by `until`
            while self.pipe.poll():
                words = self.pipe.recv()
                self.said.append(words)
                if words[0] == "live":
                    assert words[2] == digest_of({"weight": Model(words[1]).bits}), f"{self.name} holds something else"
                    self.live = words[1]

    def children(self) -> list[int]:
        return children_of(self.pid)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


@dataclass
class Tally:
    """The outcome of all trials.

    live_s: from each fault until all others had the version; of a trainer's fault, with its return.
    by_broker_s: the same, of versions that no member had by a round.
    """

    faults: Counter[str] = field(default_factory=Counter)
    live_s: list[float] = field(default_factory=list)
    rounds: Counter[int] = field(default_factory=Counter)
    late: int = 0  # faults that came when all was over: not counted
    by_broker_s: list[float] = field(default_factory=list)
    worst: str = ""


class World:
    """A broker, a trainer and three workers."""

    def __init__(self, url: str, directory: Path, seed: int) -> None:
        self.url = url
        self.directory = directory
        self.random = random.Random(seed)
        self.nursery = multiprocessing.get_context("forkserver")
        self.nursery.set_forkserver_preload(["tests.support.processes.kill_members"])
        self.members: dict[str, Process] = {}
        self.tally = Tally()
        self.version = -1
        self.usual_s = 1.0
        self.last = ""

    def start(self, *names: str) -> None:
        for name in names:
            self.members[name] = Process(self, name)
        for name in names:
            self.until(lambda name=name: ("up",) in self.members[name].said, f"{name} to be up")  # type: ignore[misc]

    def until(self, question: Any, what: str, spared: tuple[str, ...] = ()) -> None:
        """Wait, while every member but those spared must live."""
        until_s = time.monotonic() + WAIT_S
        while True:
            for name, member in self.members.items():
                if name not in spared and not member.process.is_alive():
                    raise Failed(f"{name} died while we waited for {what}")
                member.listen()
            if question():
                return
            if time.monotonic() > until_s:
                raise Failed(f"waited {WAIT_S:g} s for {what}")
            time.sleep(0.002)

    def publish(self) -> None:
        self.members[PUBLISHER].said.clear()
        self.members[PUBLISHER].pipe.send(self.version)

    def is_live(self, *but: str) -> bool:
        return all(self.members[name].live >= self.version for name in RECEIVERS if name not in but)

    def is_published(self) -> bool:
        return any(words[:2] == ("published", self.version) for words in self.members[PUBLISHER].said)

    def plain(self) -> None:
        """One version without a fault."""
        self.version += 1
        started_s = time.monotonic()
        self.publish()
        self.until(lambda: self.is_live() and self.is_published(), f"version {self.version}")
        self.usual_s = time.monotonic() - started_s

    def trial(self) -> None:
        """One version with a fault."""
        self.version += 1
        name = self.random.choice([PUBLISHER, *RECEIVERS])
        what = self.random.choices(["member", "round", "nursery"], [5, 4, 1])[0]
        deed = self.random.choice(["kill", "freeze"])
        at_s = time.monotonic() + self.random.uniform(0.0, self.usual_s)
        self.publish()
        self.until(lambda: time.monotonic() >= at_s, "the moment")
        victim = self.victim(self.members[name], what)
        if victim is None or (self.is_live() and self.is_published()):
            self.tally.late += 1
            self.settle()
            return
        os.kill(victim, signal.SIGKILL if deed == "kill" else signal.SIGSTOP)
        faulted_s = time.monotonic()
        label = f"{deed} {'trainer' if name == PUBLISHER else 'worker'} {what}"
        self.last = f"{deed} {name} {what} ({victim})"
        live_s = self.recover(name, what, deed) - faulted_s
        self.settle()
        self.note(label, live_s)

    def victim(self, member: Process, what: str) -> int | None:
        """The process to befall; waits a while for one of a round."""
        if what == "member":
            return member.pid
        until_s = time.monotonic() + self.usual_s
        while time.monotonic() < until_s:
            for nursery in member.children():
                if what == "nursery":
                    return nursery
                if grandchildren := children_of(nursery):
                    return grandchildren[0]
            member.listen()
            if self.is_published():
                return None
            time.sleep(0.001)
        return None

    def recover(self, name: str, what: str, deed: str) -> float:
        """Wait until all others have the version; start or thaw who is gone. Returns when they had it."""
        member = self.members[name]
        if what != "member":  # nobody is gone
            self.until(lambda: self.is_live() and self.is_published(), f"version {self.version} to be live")
        elif name != PUBLISHER:
            others = lambda: self.is_live(name) and self.is_published()  # noqa: E731
            self.until(others, f"version {self.version} to be live", spared=(name,))
            live_s = time.monotonic()
            self.revive(member, deed)
            return live_s
        else:
            if deed == "freeze":
                until_s = time.monotonic() + FREEZE_S
                self.until(lambda: time.monotonic() > until_s, "the trainer's return", spared=(name,))
            self.revive(member, deed)
            if deed == "kill" and not self.is_live():
                self.publish_again()
            self.until(self.is_live, f"version {self.version} to be live")
        return time.monotonic()

    def revive(self, member: Process, deed: str) -> None:
        if deed == "freeze":
            os.kill(member.pid, signal.SIGCONT)
            return
        member.end()
        self.start(member.name)

    def publish_again(self) -> None:
        """A trainer that was killed does not know whether its version is out: it publishes the next one."""
        self.version += 1
        self.publish()

    def settle(self) -> None:
        """Wait until all is as before a trial."""
        fresh = not self.members[PUBLISHER].said or self.members[PUBLISHER].said == [("up",)]
        self.until(lambda: self.is_live() and (fresh or self.is_published()), "all to settle")

    def note(self, label: str, live_s: float) -> None:
        self.tally.faults[label] += 1
        self.tally.live_s.append(live_s)
        if live_s == max(self.tally.live_s):
            self.tally.worst = f"{label}, version {self.version}"
        for words in self.members[PUBLISHER].said:
            if words[0] == "published":
                self.tally.rounds[words[3]] += 1
                self.tally.by_broker_s += [live_s] * (words[2] == 0)


def run(url: str, directory: Path, *, kills: int, seed: int, limit_s: float = float("inf")) -> Tally:
    """Hold trials until `kills` faults have come in time. Raises Failed."""
    world = World(url, directory, seed)
    ends_s = time.monotonic() + limit_s
    try:
        world.start(PUBLISHER, *RECEIVERS)
        for _ in range(3):
            world.plain()
        while sum(world.tally.faults.values()) < kills and time.monotonic() < ends_s:
            world.trial()
            done = sum(world.tally.faults.values())
            if done and done % 20 == 0 and sys.stderr.isatty():
                print(f"{done} faults, {world.tally.late} too late", file=sys.stderr)
        return world.tally
    except Failed as failure:
        logs = [
            f"--- {path.name}\n" + "\n".join(path.read_text().splitlines()[-12:]) for path in directory.glob("*.log")
        ]
        raise Failed(
            "\n".join([f"{failure}; {world.last}; after {len(world.tally.live_s)} faults", *logs])
        ) from failure
    finally:
        for member in world.members.values():
            member.end()


def command() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="end after this time, with fewer faults")
    options = parser.parse_args()
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as made, EmbeddedBroker.start(Path(made) / "broker") as broker:
        tally = run(broker.url, Path(made), kills=options.kills, seed=options.seed, limit_s=options.limit_s)
    live_s = sorted(tally.live_s)
    found = {
        "faults": len(live_s),
        "by_kind": dict(sorted(tally.faults.items())),
        "too_late": tally.late,
        "rounds": dict(sorted(tally.rounds.items())),
        "went_by_broker": len(tally.by_broker_s),
        "by_broker_s_max": round(max(tally.by_broker_s, default=0.0), 2),
        "live_s_p50": round(statistics.median(live_s), 2),
        "live_s_p99": round(live_s[int(0.99 * (len(live_s) - 1))], 2),
        "live_s_max": round(live_s[-1], 2),
        "worst": tally.worst,
        "bound_s": BOUND_S,
        "beyond_bound": sum(each > BOUND_S for each in live_s),
        "wall_s": round(time.monotonic() - started_s),
    }
    print(json.dumps(found, indent=2))
    return int(found["beyond_bound"] > 0)


if __name__ == "__main__":
    sys.exit(command())
