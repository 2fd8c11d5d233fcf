"""One agent, a bad neighbour and good ones: whatever an environment does, it costs its own trajectories alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rollfab.trainer.client import Run
from tests.support.processes.fabric_processes import Processes, processes

TIMEOUT_S = 12.0
MIB = 1 << 20
LIMIT = "the limit is 1,048,576"
HUNG = f"step took longer than {TIMEOUT_S:g} s; its process was killed"
# What is done at a step → what the dead letter's reason says.
ATTACKS = {
    "large_info": f"step: its info is 83,886,090 bytes as JSON, {LIMIT}: say less",
    "large_text": f"step: its text is 5,242,880 bytes as UTF-8, {LIMIT}: let it be shorter",
    "many_strings": f"bytes as JSON, {LIMIT}",
    "deep": "step: its info cannot be sent: RecursionError",
    "circle": "step: its info cannot be sent: ValueError: Circular",
    "large_number": "step: its info cannot be sent: ValueError: Exceeds the limit",
    "large_reward": "gave reward",
    "long_reward": "gave reward",
    "long_error": "step raised ValueError: xxxx",
    "odd_error": "step raised OddError",
    "odd_keys": "step: its info cannot be sent: TypeError: keys must be str",
    "odd_info": "step: its info cannot be sent: RuntimeError: no keys",
    "surrogate_text": "step: its text is no Unicode",
    "surrogate_info": "step: its info is no Unicode",
    "hang": HUNG,
    "spin": HUNG,
    "spin_in_c": HUNG,
    "exit": "step: its process exited with code 3",
    "exit_later": "its process exited with code 4",
    "segfault": "step: its process was ended by SIGSEGV",
    "fill_memory": "step raised MemoryError",
    "print": HUNG,
    "lie": "step: its process sent 4,294,967,295 bytes, the limit is",
    "bomb": "step: its process sent an answer that nobody asked for",
    "hang_up": "step: its process closed its channel",
}

pytestmark = [pytest.mark.timeout(180), pytest.mark.redis]


@pytest.fixture(scope="module")
def fabric(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with processes(tmp_path_factory.mktemp("neighbours")) as fabric:
        names = {
            "attacker": "tests.support.worlds.attack_worlds:Attacker",
            "neighbour": "tests.support.worlds.attack_worlds:Neighbour",
            "inside": "tests.support.worlds.worlds:Walk",
            "at-import": "tests.support.worlds.attack_at_import:Anything",
        }
        allowed = [word for name, target in names.items() for word in ("--environment", f"{name}={target}")]
        fabric.start_roles(agent=[*allowed, "--timeout", f"{TIMEOUT_S:g}", "--memory", "1024"])
        yield fabric


def neighbours(fabric: Processes, name: str) -> list[Run]:
    """Runs of good neighbours, one in processes of its own and one inside the agent, at work by now."""
    runs = [fabric.new_run(f"{kind}-{name}", kind, attempt_count_max=1) for kind in ("neighbour", "inside")]
    for run in runs:
        run.submit([{}, {}, {}], group_size=2)
    return runs


def check_unharmed(fabric: Processes, runs: list[Run], pid: int | None) -> None:
    """Nobody else's attempt failed, nobody is suspected, and the agent is the one that it was."""
    for run in runs:
        for group in fabric.collect(run, 3, 60.0):
            assert group.failures == ()
            assert {rollout.attempt for rollout in group.rollouts} == {0}
        status = fabric.ask(lambda ports, run=run: ports.board.run_status(run.run_id))
        assert status.counters.get("attempts_failed", 0) == 0
        assert status.counters.get("reaped", 0) == 0, "its claims were taken from a living agent"
    assert fabric.supervisor.children["agent"].pid == pid
    assert fabric.supervisor.children["agent"].start_count == 1


@pytest.mark.parametrize("at", [pytest.param("step", marks=pytest.mark.slow), "reset"])
def test_whatever_an_environment_does_it_pays_for_itself(fabric: Processes, at: str) -> None:
    # Given good neighbours at work on the agent; when every attack there is happens there at once
    pid = fabric.supervisor.children["agent"].pid
    bad = fabric.new_run(f"bad-{at}", "attacker", attempt_count_max=1)
    good = neighbours(fabric, at)
    attacks = {name: reason for name, reason in ATTACKS.items() if at == "step" or "reward" not in name}
    if at == "reset":
        attacks.pop("exit_later")  # that strikes while it waits for its turn: the step after says so
    tasks = [{"attack": name, "at": at} for name in attacks]
    bad.submit(tasks, group_size=1, group_ids=[f"{name}-{at}".replace("_", "-") for name in attacks])
    groups = {group.group_id: group for group in fabric.collect(bad, len(attacks), 120.0)}
    # Then each has its dead letter, which names the environment and what it did
    letters = fabric.dead_letters(bad)
    wrong = []
    for name, reason in attacks.items():
        letter = letters.get(f"{name}-{at}.0".replace("_", "-"))
        told = letter.reason if letter else "none"
        if "environment 'attacker'" not in told or reason.replace("step", at, 1) not in told or len(told) > 2_000:
            wrong.append(f"{name}: {told[:300]}")
    assert wrong == []
    assert all(group.rollouts == () for group in groups.values())
    # And nobody else has noticed
    check_unharmed(fabric, good, pid)


def test_a_module_that_ends_who_imports_it_ends_no_agent(fabric: Processes) -> None:
    pid = fabric.supervisor.children["agent"].pid
    bad = fabric.new_run("bad-import", "at-import", attempt_count_max=2)
    good = neighbours(fabric, "import")
    bad.submit([{}], group_size=2)
    (group,) = fabric.collect(bad, 1, 60.0)
    assert len(group.failures) == 2
    for letter in fabric.dead_letters(bad).values():
        assert "environment 'at-import': load: its process exited with code 9" in letter.reason
    check_unharmed(fabric, good, pid)


@pytest.mark.slow
def test_twenty_large_answers_at_once_hold_up_nobody(fabric: Processes) -> None:
    pid = fabric.supervisor.children["agent"].pid
    bad = fabric.new_run("bad-many", "attacker", attempt_count_max=1)
    good = neighbours(fabric, "many")
    bad.submit([{"attack": "large_info"}] * 20, group_size=1)
    fabric.collect(bad, 20, 120.0)
    assert len(fabric.dead_letters(bad)) == 20
    check_unharmed(fabric, good, pid)
