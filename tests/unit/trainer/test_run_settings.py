"""Whatever a run is made with, its record can be read again, or it is refused by name; evaluations say what stays."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from rollfab.fabric.contract.errors import InputError, RunMismatch
from rollfab.fabric.contract.records import RunConfig, WorkerInfo
from rollfab.trainer.aio import AsyncFabric
from rollfab.trainer.checks import check_run
from rollfab.trainer.grpo import build_model
from tests.standin.fabric import StandInFabric

RUN = RunConfig(run_id="r1", model="tiny", environment="frozenlake")
SETTINGS = [field.name for field in dataclasses.fields(RunConfig) if field.name != "run_id"]
WRONG: list[Any] = ["yes", "", 3, -1, 2.5, float("nan"), 1 << 60, None, True, [1], {"a": 1}, {1: 2}, b"x", object()]


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("value", WRONG, ids=lambda value: repr(value)[:12])
def test_a_setting_is_refused_by_name_or_its_run_can_be_read_again(name: str, value: Any) -> None:
    checked, refusal = None, ""
    try:
        checked = check_run(dataclasses.replace(RUN, **{name: value}))
    except InputError as error:
        refusal = str(error)
    assert name in refusal or (checked is not None and RunConfig.decode(checked.encode()) == checked)


async def test_an_evaluation_says_what_it_has_of_a_call_that_was_interrupted(caplog: pytest.LogCaptureFixture) -> None:
    ports, model = StandInFabric(), dict(build_model("tiny", 0).named_parameters())
    await ports.board.heartbeat(WorkerInfo(worker_id="a", role="agent", pid=1, host="h", environments=["frozenlake"]))
    async with AsyncFabric(ports, "redis://stand-in") as fabric:
        run = await fabric.run("r1", model="tiny", environment="frozenlake")
        await run.publish(model, version=0)
        # Given evaluations that were killed before they had weights, one of them with options of its own
        for name, options in (("as-it-is", {}), ("slippery", {"is_slippery": True})):
            left = {"staleness": 0, "environment_options": options}
            await fabric.run(f"r1-eval-{name}", model="tiny", environment="frozenlake", **left)
        # When they are called again, then what cannot change stays, and is told once where nobody asked for it
        for name in ("as-it-is", "slippery", "slippery"):
            assert (await fabric.evaluation("r1", name=name)).evaluates == 0
        (told,) = [each.getMessage() for each in caplog.records if "interrupted" in each.getMessage()]
        assert told.startswith("run 'r1-eval-slippery': environment_options is {'is_slippery': True}: it was left")
        assert "rollfab runs rm --run r1-eval-slippery" in told
        # And what is asked for otherwise is refused, with both ways out
        with pytest.raises(
            RunMismatch, match="a name of its own, or delete this one: `rollfab runs rm --run r1-eval-s"
        ):
            await fabric.evaluation("r1", name="slippery", environment_options={})
