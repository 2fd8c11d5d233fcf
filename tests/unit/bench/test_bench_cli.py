"""The benches that take no options of their own: each has what its command calls."""

from __future__ import annotations

from importlib import import_module

import pytest

from tests.bench.cli import PLAIN


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_bench_has_what_its_command_calls(name: str) -> None:
    bench = import_module(f"tests.bench.{name}.main")
    assert type(bench.FULL) is type(bench.QUICK)
    assert callable(bench.measure) and callable(bench.print_table)
