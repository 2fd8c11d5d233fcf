"""Members of a collective that die or freeze in the middle of a version: a round without them, and no hang."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from rollfab.fabric.opened import RedisFabric
from tests.support.processes.collective_processes import Sender, Stage, check_live, stage

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.redis, pytest.mark.timeout(60)]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with stage(tmp_path_factory.mktemp("collective")) as found:
        yield found


@pytest.fixture(autouse=True)
def members_end(scene: Stage) -> Iterator[None]:
    yield
    scene.end()


@pytest.mark.parametrize("misdeed", ["die", "freeze"])
async def test_a_receiver_that_drops_out_costs_one_round_and_is_back_for_the_next_version(
    scene: Stage, misdeed: str
) -> None:
    # Given three receivers, one of which drops out at the third message
    run_id = f"receiver-{misdeed}"
    first, second, third = scene.start(run_id, first="", second=f"{misdeed}:3", third="")
    async with await RedisFabric.open(scene.url, client_name="publisher") as fabric:
        sender = await Sender.open(fabric, run_id)

        # When a version is sent
        report, digest = await sender.send(0, first, second, third)

        # Then the others have it, by one more round
        assert (report.reached, report.left_out, report.round_count) == (("first", "third"), ("second",), 2)
        assert report.is_enough
        check_live(0, digest, first, third)

        # And when it is there again, the next version is for all of them, in one round
        if misdeed == "freeze":
            second.signal(signal.SIGCONT)
            second.wait_for("idle")
        else:
            second.end()
            [second] = scene.start(run_id, second="")
        report, digest = await sender.send(1, first, second, third)
        assert (report.reached, report.round_count) == (("first", "second", "third"), 1)
        check_live(1, digest, first, second, third)


async def test_a_publisher_that_drops_out_leaves_nothing_behind(scene: Stage) -> None:
    # Given two runs whose publishers drop out at their third message, each in its way
    receivers = {run_id: scene.start(run_id, first="", second="") for run_id in ("dies", "freezes")}
    scene.start("dies", publisher="die:3")
    scene.start("freezes", publisher="freeze:3")

    # When their receivers have given up
    for member in [*receivers["dies"], *receivers["freezes"]]:
        member.wait_for("idle")

    # Then nothing is published, and what another publisher sends under the same version is what they take
    async with await RedisFabric.open(scene.url, client_name="publisher") as fabric:
        for run_id, members in receivers.items():
            assert (await fabric.weights.head(run_id)).version == -1
            sender = await Sender.open(fabric, run_id)
            report, digest = await sender.send(0, *members)
            assert (report.reached, report.round_count) == (("first", "second"), 1)
            check_live(0, digest, *members)
