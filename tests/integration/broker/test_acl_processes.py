"""The broker's ACL file: a whole fabric of real processes, each with its own role's user and no other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import rollfab
from rollfab.deploy.cli.options import with_ports
from rollfab.deploy.cli.status import snapshot
from rollfab.deploy.local.supervisor import Supervisor
from tests.integration.cli.test_cli import rollfab as rollfab_here
from tests.support.brokers.guarded_broker import Guarded
from tests.support.processes.fabric_processes import PYTHONPATH, tiny_weights
from tests.support.until import wait_until

pytestmark = pytest.mark.redis

ROLLOUT_ROLES = ("dedicated", "serving")


@contextmanager
def roles(broker: Guarded, directory: Path, *started: str) -> Iterator[Supervisor]:
    """Real processes, each with its own role's user and no other."""
    words = {
        "controller": ["controller", "--name", "controller"],
        "agent": ["agent", "--environment", "broken=tests.support.worlds.worlds:Broken"],
        "dedicated": ["worker"],
        "serving": ["worker", "--role", "serving"],
        "reward": ["reward", "--reward", "broken=tests.support.worlds.worlds:broken_reward"],
    }
    with Supervisor(directory / "logs") as supervisor:
        for name in started:
            role = "worker" if name in ("dedicated", "serving") else name
            environment = {"ROLLFAB_URL": broker.url(role), "PYTHONPATH": PYTHONPATH}
            supervisor.add(name, words[name], environment=environment)
        yield supervisor


def logs(supervisor: Supervisor) -> str:
    return "\n".join(f"== {name}\n{child.tail(20)}" for name, child in supervisor.children.items())


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_real_processes_do_all_their_work_each_with_its_own_user(broker: Guarded, tmp_path: Path) -> None:
    with (
        roles(broker, tmp_path, "controller", "agent", "dedicated", "serving", "reward") as supervisor,
        rollfab.connect(broker.url("trainer")) as trainer,
    ):
        # Given all roles, a run whose rewards come by rq, and weights
        wait_until(lambda: _are_here(status(broker)), lambda: logs(supervisor), 60.0, 0.1)
        run = trainer.run("r1", model="tiny", environment="broken", reward="broken", attempt_count_max=1)
        run.publish(tiny_weights(), version=0)

        # When work is pushed, some of which fails, and new weights are published meanwhile
        names = run.submit([{"seed": 1}, {"seed": 2}, {"seed": 3, "fault": "step"}], group_size=2)
        run.publish({name: each + 1e-3 for name, each in tiny_weights().items()}, version=1)
        groups = list(run.groups(timeout=60, count=3))

        # Then it comes back, and what failed is a dead letter
        assert sorted(group.group_id for group in groups) == sorted(names), logs(supervisor)
        assert [rollout.reward for group in groups for rollout in group.rollouts] == [2.0] * 4
        assert run.status().dead_count == 2

        # And people can look, and lend
        assert len(command(broker, "operator", "dead", "ls", "--run", "r1")) == 2
        assert [row["version"] for row in command(broker, "operator", "weights", "ls", "r1")][-1] == 1
        assert command(broker, "operator", "lend", "on", "--all")["lends"]["*"]["mode"] == "on"
        late = run.submit([{"seed": seed} for seed in range(40)], group_size=8)
        wait_until(lambda: _lent(status(broker)), lambda: logs(supervisor), 60.0, 0.1)
        assert command(broker, "operator", "lend", "off")["lends"]["*"]["mode"] == "off"
        assert all(run.cancel(name) for name in late[5:])
        assert len(list(run.groups(timeout=60, count=5))) == 5

    # And nobody asked for more than it may
    assert broker.denials() == []


def status(broker: Guarded) -> dict[str, Any]:
    return with_ports(broker.url("operator"), snapshot)


def _are_here(said: dict[str, Any]) -> bool:
    ready = {row["role"] for row in said["workers"] if row["state"] == "ready" or row["role"] in ROLLOUT_ROLES}
    return ready >= {"agent", "reward", "controller", *ROLLOUT_ROLES}


def _lent(said: dict[str, Any]) -> bool:
    serving = {row["worker_id"] for row in said["workers"] if row["role"] == "serving"}
    return bool(serving & set(said["leases"]))


def command(broker: Guarded, role: str, *words: str) -> Any:
    """What a command prints, run with a role's user."""
    done = rollfab_here(*words, "--json", url=broker.url(role))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
