"""Whatever a run is made with, its record can be read again, or it is refused by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from rollfab.fabric.contract.errors import InputError
from rollfab.fabric.contract.records import RunConfig
from rollfab.trainer.checks import check_run

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
