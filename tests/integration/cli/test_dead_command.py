"""`rollfab dead` as a person meets it: causes, what will happen, what has; and kills in the middle."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from typer.testing import CliRunner, Result

from rollfab.deploy.main import app
from rollfab.fabric.contract.records import RunConfig
from rollfab.fabric.opened import RedisFabric
from tests.contracts.test_queue import group_of_size, letter_of
from tests.support.records import rollout_of

pytestmark = [pytest.mark.redis, pytest.mark.usefixtures("redis")]  # which empties the broker

RUN = RunConfig(run_id="r1", model="tiny", environment="frozenlake", trajectory_count_max=5_000)


def typed(url: str, *words: str, says: str = "") -> Result:
    return CliRunner().invoke(app, words, input=says, env={"ROLLFAB_URL": url, "COLUMNS": "80"})


async def bury(url: str, groups: dict[str, list[str]]) -> None:
    """Push groups; each trajectory dies for its reason, or ends well where that is empty."""
    async with await RedisFabric.open(url, client_name="tests") as ports:
        await ports.board.create_run(RUN)
        queue = ports.trajectories(RUN)
        for group_id, reasons in groups.items():
            await ports.rollouts(RUN).push([group_of_size(group_id, len(reasons))])
            for claim in await queue.claim("a1", len(reasons)):
                reason = reasons[claim.job.index]
                if reason:
                    letter = replace(letter_of(claim), reason=reason)
                    await queue.fail(claim.job.trajectory_id, claim.fence, letter, is_final=True)
                else:
                    await queue.settle(claim, rollout_of(claim.job, 1.0, (0,), spans=()), is_scored=True)


async def depths(url: str) -> tuple[int, int]:
    """Trajectories that wait, and dead letters."""
    async with await RedisFabric.open(url, client_name="tests") as ports:
        status = await ports.board.run_status("r1")
        return status.trajectories["queued"], status.dead_count


def test_dead_letters_are_listed_by_cause_and_shown_whole(url: str) -> None:
    asyncio.run(
        bury(url, {"g1": ["port 1 is taken", "port 2 is taken", "\x1b[2Jpwned 漢字"], "g2": ["port 3 is taken"]})
    )

    listed = typed(url, "dead", "ls").output
    assert listed.index("3 trajectories of 2 groups:\n  port # is taken") < listed.index("1 trajectory of 1 group:")
    assert "dead show g1.0 --run r1" in listed and "\x1b" not in listed
    assert "4 trajectories of 2 groups in all" in listed
    rows = json.loads(typed(url, "dead", "ls", "--run", "r1", "--cause", "PORT", "--json").output)
    assert [(row["trajectory_id"], row["cause"]) for row in rows] == [
        (n, "port # is taken") for n in ("g1.0", "g1.1", "g2.0")
    ]

    assert "task: " in typed(url, "dead", "show", "g1.0").output
    assert json.loads(typed(url, "dead", "show", "g1.0", "--json").output)["traceback"] == "Traceback …"
    missed = typed(url, "dead", "show", "g1.9")
    assert "did you mean g1." in str(missed.exception)


def test_what_will_happen_is_said_before_it_does_and_only_then(url: str) -> None:
    asyncio.run(bury(url, {"g1": ["port 1", ""], "g2": ["port 2", "it hung"]}))

    for words, says in (((), "n\n"), ((), ""), (("--dry-run",), "")):
        done = typed(url, "dead", "retry", "--all", "--cause", "port", *words, says=says)
        assert "run r1, to run again in their groups: 2 trajectories of 2 groups" in done.output
        assert (done.exit_code == 0) is (words != ())
        assert asyncio.run(depths(url)) == (0, 3)
    assert (
        "running again: 2 trajectories of 2 groups"
        in typed(url, "dead", "retry", "--all", "--cause", "port", "--yes").output
    )
    assert asyncio.run(depths(url)) == (2, 1)

    done = json.loads(typed(url, "dead", "discard", "g2.1", "--json").output)
    assert (done["trajectory_count"], done["group_count"], done["refused"]) == (1, 1, [])
    assert asyncio.run(depths(url)) == (2, 0)
    assert typed(url, "dead", "retry", "--all", "--yes").exit_code == 0, "there is nothing to do"


def test_a_group_that_a_trainer_has_is_refused_with_the_cause(url: str) -> None:
    asyncio.run(bury(url, {"g1": ["port 1", ""]}))

    async def receive() -> None:
        async with await RedisFabric.open(url, client_name="tests") as ports:
            assert await ports.rollouts(RUN).receive("t", 1, 1.0)

    asyncio.run(receive())
    for words in (("--all", "--yes"), ("g1.0",)):
        done = typed(url, "dead", "retry", *words)
        assert done.exit_code == 1
        assert "not 1 trajectory of 1 group: a trainer has its group in hand" in " ".join(done.output.split())
    assert asyncio.run(depths(url)) == (0, 1), "its letter is kept"


@pytest.mark.parametrize(
    "words",
    ["retry", "retry g1.0 --all", "retry --cause x", "retry g1.0 --cause x", "discard", "discard --yes"],
)
def test_whoever_does_not_say_which_is_asked(url: str, words: str) -> None:
    asyncio.run(bury(url, {"g1": ["port 1"]}))
    done = typed(url, "dead", *words.split())
    assert "say which: names of trajectories, or --all" in str(done.exception)
    assert asyncio.run(depths(url)) == (0, 1)


@pytest.mark.timeout(90)
def test_a_retry_of_all_that_is_killed_again_and_again_is_done_once_each(url: str) -> None:
    # Given a thousand dead trajectories of five hundred groups
    asyncio.run(bury(url, {f"g{number}": ["it raised", "it raised"] for number in range(500)}))
    assert asyncio.run(depths(url)) == (0, 1000)

    # When retries of all are killed at random points, and one at last is not
    words = [sys.executable, "-m", "rollfab", "dead", "retry", "--all", "--yes"]
    for round_ in range(4):
        with subprocess.Popen(words, env={**os.environ, "ROLLFAB_URL": url}, stderr=subprocess.DEVNULL) as process:
            until_s = time.monotonic() + 20
            while asyncio.run(depths(url)) == (0, 1000) and process.poll() is None and time.monotonic() < until_s:
                time.sleep(0.01 * round_)
            process.send_signal(signal.SIGKILL)
        queued, dead = asyncio.run(depths(url))
        assert queued + dead == 1000 and queued % 2 == 0, "groups are whole"
    assert typed(url, "dead", "retry", "--all", "--yes").exit_code == 0

    # Then each runs once
    assert asyncio.run(depths(url)) == (1000, 0)

    async def claim() -> list[str]:
        async with await RedisFabric.open(url, client_name="tests") as ports:
            return [each.job.trajectory_id for each in await ports.trajectories(RUN).claim("a2", 5000)]

    claimed = asyncio.run(claim())
    assert len(claimed) == len(set(claimed)) == 1000
