"""Members of a collective that die or freeze in the middle of a version: a round without them, and no hang."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from rollfab.fabric.opened import RedisFabric
from tests.support.processes.collective_processes import Stage, check_live, stage

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
        sender = await scene.sender(fabric, run_id)

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


async def test_a_member_that_freezes_before_the_group_is_built_is_named_and_the_next_round_is_without_it(
    scene: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    # Given three receivers, one of which says where it is and then freezes
    first, second, third = scene.start("built", first="", second="freeze-as-it-meets", third="")
    async with await RedisFabric.open(scene.url, client_name="publisher") as fabric:
        sender = await scene.sender(fabric, "built")

        # When a version is sent
        with caplog.at_level("WARNING"):
            report, digest = await sender.send(0, first, second, third)

        # Then the others have it by a round without that one, and the log names it and what is next
        assert (report.reached, report.left_out, report.round_count) == (("first", "third"), ("second",), 2)
        check_live(0, digest, first, third)
        [silent] = [record for record in caplog.records if record.message.startswith("collective.member_silent")]
        assert (silent.member, silent.message.partition(": ")[2]) == (  # type: ignore[attr-defined]
            "second",
            "the round is without it; see whether it runs",
        )
        [failed] = [record for record in caplog.records if record.message.startswith("collective.round_failed")]
        assert failed.message.endswith("members that answer again have another round")

        # And it is back for the next version
        second.signal(signal.SIGCONT)
        second.wait_for("idle")
        report, _ = await sender.send(1, first, second, third)
        assert (report.reached, report.round_count) == (("first", "second", "third"), 1)


async def test_a_publisher_that_drops_out_leaves_nothing_behind(scene: Stage) -> None:
    # Given two runs whose publishers drop out at their third message, each in its way
    receivers = {run_id: scene.start(run_id, first="", second="") for run_id in ("dies", "freezes")}
    publishers = [*scene.start("dies", publisher="die:3"), *scene.start("freezes", publisher="freeze:3")]

    # When their receivers have given up
    for publisher in publishers:
        publisher.wait_out()
    for member in [*receivers["dies"], *receivers["freezes"]]:
        member.forget()  # looks at the board before there was an offer
        member.wait_for("idle")

    # Then nothing is published, and what another publisher sends under the same version is what they take
    async with await RedisFabric.open(scene.url, client_name="publisher") as fabric:
        for run_id, members in receivers.items():
            assert (await fabric.weights.head(run_id)).version == -1
            sender = await scene.sender(fabric, run_id)
            report, digest = await sender.send(0, *members)
            assert (report.reached, report.round_count) == (("first", "second"), 1)
            check_live(0, digest, *members)
