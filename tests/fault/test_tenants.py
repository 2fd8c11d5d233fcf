"""Twenty runs on one agent and one reward worker, of which one is as bad as it can be: the others hardly notice.

Its environment, its reward and a worker that was taken over look for secrets meanwhile, and for whom they reach.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import pwd
import socketserver
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, variance
from typing import Any

import pytest

import rollfab
from rollfab.deploy.local.supervisor import Supervisor
from rollfab.fabric.contract.records import Failure, Lease, RunConfig, TurnResult
from rollfab.fabric.opened import RedisFabric
from rollfab.fabric.ports.queue import TurnClaim, TurnSettle
from rollfab.fabric.queue.acl import RIGHTS, user_name
from rollfab.trainer.client import Run
from rollfab.workers.environments.confinement import means
from tests.integration.foreign.test_bad_neighbours import ATTACKS
from tests.integration.foreign.test_canaries import PYTHON, canary
from tests.support import records
from tests.support.brokers.guarded_broker import ADMIN_PASSWORD, Guarded, guarded_broker
from tests.support.brokers.key_table import names_and_kinds
from tests.support.leases import set_lease
from tests.support.processes.fabric_processes import PYTHONPATH, ROOT, Processes
from tests.support.worlds.reward_worlds import FAULTS

GOOD_COUNT = 19
GROUP_SIZE = 2
ROUND_COUNT = 4  # of each, by turns: a machine that others use as well is not the same for long
ROUND_COUNT_MAX = 10  # where the first ones look bad or hold few looks: a slow minute ends, a bad neighbour stays
MEASURED_S = 8.0
KEPT_FRACTION = 0.9
QUIET_S = 2.0  # until all are at work
LOOK_EVERY = 4  # attacks

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.alone, pytest.mark.redis, pytest.mark.timeout(600)]


class Neighbourhood(Processes):
    """Roles with users and variables of their own; passwords, variables and tasks of the good runs are secrets."""

    def __init__(self, broker: Guarded, directory: Path, outside: int) -> None:
        self._broker = broker
        self.url = f"redis://admin:{ADMIN_PASSWORD}@127.0.0.1:{broker.server.port}/0"
        self.supervisor = Supervisor(directory / "logs")
        self.fabric = rollfab.connect(broker.url("trainer"))
        self.redis = broker.admin
        self.redis.set("secret", canary())
        self.spy_count = 0
        self._spy = self._start_spy()
        self.task = {"pids": [], "brokers": [broker.server.port]}
        if means(is_offline=True).namespaces is not None:
            self.task["brokers"].append(outside)

    def start(self, name: str, role: str, *words: str) -> None:
        place = {"PYTHONPATH": PYTHONPATH, "ROLLFAB_URL": self._broker.url(role), "HF_TOKEN": canary()}
        offline = ["--no-network"] if means(is_offline=True).namespaces is not None else []
        self.supervisor.add(name, [role, *words, *offline], environment=place)

    def _start_spy(self) -> subprocess.Popen[str]:
        """A worker that is taken over: another user of the machine, where there may be one."""
        runs = ("bad", "good-0")
        keys = [name for name, _ in names_and_kinds() if "{rf}" in name]
        keys += [name.replace("{r1", f"{{{run}") for run in runs for name, _ in names_and_kinds() if "{r1" in name]
        keys += ["secret", "rq:queues", "rq:queue:rollfab"]
        base = "rf:{%s.0}:"
        each = [base + name for name in ("group:GROUP", "rollouts:GROUP")]
        opened = {base % run + "open": [name % run for name in each] for run in runs}
        nobody = pwd.getpwnam("nobody")
        is_root = os.geteuid() == 0
        user: dict[str, Any] = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []} if is_root else {}
        task = {"keys": keys, "open": opened, **({} if is_root else {"only": [os.getppid()]})}
        return subprocess.Popen(
            [PYTHON, "-c", f"from tests.support.worlds.curious_worlds import spy; spy({task!r})"],
            cwd=ROOT,
            env={"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1", "ROLLFAB_URL": self._broker.url("worker")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **user,
        )

    def spy(self) -> None:
        """The worker that is taken over looks once more."""
        assert self._spy.stdin is not None
        self._spy.stdin.write("\n")
        self._spy.stdin.flush()
        self.spy_count += 1

    def spied(self) -> tuple[list[str], int]:
        """What it has found beside its own password, in how many looks."""
        said, _ = self._spy.communicate(timeout=60)
        told = json.loads(said)
        own = self._broker.passwords[user_name("worker")]
        assert own in told["found"], "it does not see what is there"
        return [each for each in told["found"] if each != own], told["count"]

    def close(self) -> None:
        self._spy.kill()
        self._spy.wait()
        self.supervisor.stop()
        self.fabric.close()


@contextmanager
def listening() -> Iterator[tuple[int, list[bytes]]]:
    """A host that nobody may connect to: its port, and who did. It tells a secret to whoever comes."""
    came = list[bytes]()

    class Door(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            came.append(b"somebody")
            self.request.sendall(canary().encode())

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Door) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1], came
        server.shutdown()


@pytest.fixture
def outside() -> Iterator[tuple[int, list[bytes]]]:
    with listening() as found:
        yield found


@pytest.fixture
def fabric(tmp_path_factory: pytest.TempPathFactory, outside: tuple[int, list[bytes]]) -> Iterator[Neighbourhood]:
    directory = tmp_path_factory.mktemp("tenants")
    secrets = directory / "users.passwords"
    secrets.write_text("".join(f"{user_name(role)} {canary()}\n" for role in RIGHTS))
    with guarded_broker(directory) as broker:
        fabric = Neighbourhood(broker, directory, outside[0])
        try:
            allowed = [
                word
                for name, target in (("attacker", "Attacker"), ("neighbour", "Neighbour"))
                for word in ("--environment", f"{name}=tests.support.worlds.attack_worlds:{target}")
            ]
            # A place for each trajectory: what anybody may have is shared by weight, whoever asks for more.
            words = ["--count", str((GOOD_COUNT + 1) * GROUP_SIZE), "--timeout", "3", "--memory", "1024"]
            fabric.start("agent", "agent", *allowed, *words)
            rewards = [
                word
                for name in ("bad", "well")
                for word in ("--reward", f"{name}=tests.support.worlds.reward_worlds:{name}")
            ]
            fabric.start("reward", "reward", *rewards, "--timeout", "2", "--memory", "512")
            fabric.wait_for_role("agent", "reward")
            fabric.task["pids"] = [child.pid for child in fabric.supervisor.children.values()]
            yield fabric
        finally:
            fabric.close()


async def answer(fabric: Neighbourhood, runs: list[Run], is_over: threading.Event) -> None:
    """Every run's turns at once, each with one token: a policy that is nobody's bottleneck."""
    async with await RedisFabric.open(fabric.url, client_name="policy") as ports:

        async def serve(config: RunConfig) -> None:
            lease = Lease(worker_id="w", run_id=config.run_id, lease_epoch=1, slot_count=64, lease_until_ms=None)
            await set_lease(ports.board, lease, None)
            turns, done = ports.turns(config), list[TurnSettle]()
            while not is_over.is_set():
                got = await turns.exchange("w", settles=done, want=64, lease_epoch=1, active_version=0)
                done = [TurnSettle(claim=claim, result=result_of(claim)) for claim in got.claims]
                if not done:
                    await asyncio.sleep(0.02)

        await asyncio.gather(*(serve(run.config) for run in runs))


def result_of(claim: TurnClaim) -> TurnResult:
    return records.result_of(claim.job.turn_id, (7,), finish_reason="length", context_digest=claim.job.context_digest)


class Tenants:
    """The good runs, each with one group under way at any time, and the bad one, which always has as many."""

    def __init__(self, fabric: Neighbourhood) -> None:
        self._fabric = fabric
        options = {"turns": 4, "pace_s": 0.25}
        self.good = [
            fabric.new_run(
                f"good-{number}", "neighbour", environment_options=options, reward="well", attempt_count_max=1
            )
            for number in range(GOOD_COUNT)
        ]
        self.bad = fabric.new_run("bad", "attacker", reward="bad", attempt_count_max=1)
        for run in self.good:
            run.submit([{"secret": canary()}], group_size=GROUP_SIZE)
        attacks = ({"attack": name, "at": where} for name in ATTACKS for where in ("step", "reset"))
        harm = [*attacks, *({"fault": name} for name in FAULTS)]
        looks = {"attack": "look", "fault": "looks", **fabric.task}
        parts = [harm[first : first + LOOK_EVERY] for first in range(0, len(harm), LOOK_EVERY)]
        self._harm = itertools.cycle([each for part in parts for each in (looks, *part)])
        self._bad_count = 0  # of its groups, how many are under way
        self.harm_count = 0
        self.attempts: set[int] = set()
        self.failures: list[Failure] = []
        self.looks: list[tuple[list[str], float]] = []  # what its environment has found, and its reward

    def work(self, duration_s: float, *, is_attacked: bool) -> int:
        """Groups of the good ones that came within so long."""
        count, until_s = 0, time.monotonic() + duration_s
        while time.monotonic() < until_s:
            count += self._look(is_attacked=is_attacked)
        return count

    def end_attacks(self) -> None:
        """What the bad one has under way comes to its end."""
        self._fabric.until(lambda: self._look(is_attacked=False) >= 0 and self._bad_count == 0, 60.0, "it has ended")

    def _look(self, *, is_attacked: bool) -> int:
        count = 0
        for run in self.good:
            for group in run.groups(timeout=0.001):
                count += 1
                self.failures += group.failures
                self.attempts |= {rollout.attempt for rollout in group.rollouts}
                run.submit([{"secret": canary()}], group_size=GROUP_SIZE)
        if is_attacked and self._bad_count == 0:
            harm = next(self._harm)
            if harm.get("attack") == "look":
                self._fabric.spy()
            self.bad.submit([harm], group_size=GROUP_SIZE)
            self._bad_count += 1
            self.harm_count += 1
        for group in self.bad.groups(timeout=0.001):
            self._bad_count -= 1
            rollouts = [rollout for rollout in group.rollouts if "found" in rollout.info]
            self.looks += [(rollout.info["found"], rollout.reward) for rollout in rollouts]
        self._fabric.supervisor.watch()
        return count


def is_kept(alone: list[int], beside: list[int]) -> bool:
    """Whether nearly as much is done beside a bad neighbour as alone, as far as the rounds can tell."""
    doubt = 2 * math.sqrt((variance(alone) + variance(beside)) / len(alone))  # of the difference, at 95 %
    return mean(beside) + doubt >= KEPT_FRACTION * mean(alone)


def test_a_bad_neighbour_takes_nothing_from_nineteen_good_ones(
    fabric: Neighbourhood, outside: tuple[int, list[bytes]]
) -> None:
    # Given nineteen runs at work, and a twentieth that does whatever harm it can, again and again
    tenants = Tenants(fabric)
    is_over = threading.Event()
    runs = [*tenants.good, tenants.bad]
    policy = threading.Thread(target=lambda: asyncio.run(answer(fabric, runs, is_over)), daemon=True)
    policy.start()
    begun_count = 0
    while begun_count < 3 * GOOD_COUNT:  # until each has its processes
        begun_count += tenants.work(QUIET_S, is_attacked=False)
    # When they work alone and beside it, by turns
    alone, beside = list[int](), list[int]()
    while len(alone) < ROUND_COUNT_MAX and not (
        len(alone) >= ROUND_COUNT and fabric.spy_count >= ROUND_COUNT and is_kept(alone, beside)
    ):
        alone.append(tenants.work(MEASURED_S, is_attacked=False))
        tenants.work(QUIET_S, is_attacked=True)
        beside.append(tenants.work(MEASURED_S, is_attacked=True))
        tenants.end_attacks()
    is_over.set()
    policy.join(20)
    # Then they do nearly as much as alone, and no attempt of theirs has failed
    print(f"groups in {MEASURED_S:g} s: {alone} alone, {beside} beside {tenants.harm_count} attacks")
    assert (tenants.attempts, tenants.failures) == ({0}, [])
    assert is_kept(alone, beside)
    assert {child.start_count for child in fabric.supervisor.children.values()} == {1}
    letters = fabric.dead_letters(tenants.bad)
    assert len(letters) >= 4
    # And neither its environment, nor its reward, nor a worker has learned anything or reached anybody
    assert len(tenants.looks) >= ROUND_COUNT
    assert all(look == ([], 1.0) for look in tenants.looks)
    assert [letter.reason for letter in letters.values() if "canary-" in letter.reason] == []
    assert fabric.spied() == ([], fabric.spy_count)
    assert fabric.spy_count >= ROUND_COUNT
    assert outside[1] == []
