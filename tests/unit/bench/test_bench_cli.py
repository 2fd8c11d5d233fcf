"""What the benches' commands call, and refuse."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from rollfab.fabric.contract.errors import ConfigError
from tests.bench.cli import PLAIN, training
from tests.bench.training import main


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_bench_has_what_its_command_calls(name: str) -> None:
    bench = import_module(f"tests.bench.{name}.main")
    assert type(bench.FULL) is type(bench.QUICK)
    assert callable(bench.measure) and callable(bench.print_table)


@pytest.mark.parametrize(
    ("name", "cause"),
    [("curve.pngg", "ends in .pngg"), ("curve", "ends in no suffix"), ("none/curve.svg", "is not there")],
)
def test_a_figure_that_cannot_be_drawn_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, cause: str
) -> None:
    monkeypatch.setattr(main, "bench_training", lambda **_: pytest.fail("it measures"))
    with pytest.raises(ConfigError, match=cause):
        training(figure=str(tmp_path / name))
