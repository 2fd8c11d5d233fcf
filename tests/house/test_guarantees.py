"""Every promise in docs/guarantees.md names a test, and that test exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

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


@cache
def functions_of(path: Path) -> set[str]:
    """The test functions of a file."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, functions)}
