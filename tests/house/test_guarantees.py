"""Every promise in docs/guarantees.md names a test, and that test exists."""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from pathlib import Path

import pytest

from rollfab.deploy.roles.options import BROKER_WAIT_S
from rollfab.fabric.opened import RedisFabric
from rollfab.workers.agent.run import AgentConfig

ROOT = Path(__file__).parents[2]
DOC = ROOT / "docs" / "guarantees.md"
NAME = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
WITHOUT_PROOF = "Not promised"


def sections() -> dict[str, str]:
    """Text by heading."""
    _, *parts = re.split(r"^## ", DOC.read_text(), flags=re.MULTILINE)
    return {heading: text for heading, _, text in (part.partition("\n") for part in parts)}


def promises() -> list[str]:
    """The items of every section that promises something."""
    texts = [text for heading, text in sections().items() if heading != WITHOUT_PROOF]
    return [item for text in texts for item in re.split(r"^- ", text, flags=re.MULTILINE)[1:]]


def test_there_are_promises_and_what_is_not_promised() -> None:
    assert len(promises()) >= 20
    assert WITHOUT_PROOF in sections()


@pytest.mark.parametrize("promise", promises(), ids=lambda promise: " ".join(promise.split()[:6]))
def test_every_promise_names_tests_that_exist(promise: str) -> None:
    named = NAME.findall(promise)

    assert named, "no test is named"
    assert promise.count("::") == len(named), "a name that cannot be read"
    for path, name in named:
        assert name in functions_of(ROOT / path), f"{path} has no {name}"


PATIENCE_S = inspect.signature(RedisFabric.open).parameters["patience_s"].default


@pytest.mark.parametrize(
    "words",
    [
        f"An agent whose event loop stands keeps its claims for {AgentConfig.hung_s:g} s.",
        f"A broker that is away for longer than patience ({PATIENCE_S:g} s) is an error",
        f"or for the end of a session, is told after {BROKER_WAIT_S:g} s that the broker does not answer",
    ],
)
def test_times_that_tests_shorten_are_as_promised_where_nobody_sets_them(words: str) -> None:
    assert words in " ".join(DOC.read_text().split())


@cache
def functions_of(path: Path) -> set[str]:
    """The test functions of a file."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, functions)}
