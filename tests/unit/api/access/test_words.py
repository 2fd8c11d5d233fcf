"""Next steps as HTTP's faces tell them: in every text that may reach a client, none in Python's words."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from rollfab.api.access.words import Words
from rollfab.api.gateway.problems import WORDS
from rollfab.api.training.words import TRAINING

ROOT = Path(__file__).parents[4]
LIBRARY = ("fabric/**/*.py", "trainer/aio.py", "trainer/publish/*.py", "api/access/*.py")
FACES: dict[str, tuple[Words, tuple[str, ...], tuple[str, ...]]] = {  # files, and texts of them that are not said
    "api --train": (
        TRAINING,
        (
            *LIBRARY,
            "api/**/*.py",
            *(f"trainer/{name}.py" for name in ("checks", "evaluation", "groups", "receipts", "waiting")),
        ),
        (),
    ),
    "gateway": (
        WORDS,
        (*LIBRARY, "api/gateway/*.py", "api/inference/*.py", "workers/agent/*.py", "deploy/roles/inference.py"),
        ("1If it is still to come",),  # of lending
    ),
}
PROSE = re.compile(r"[a-z]{2,},? [a-z]+ \S")
COMMAND = re.compile(r"`rollfab [^`]*(?:`|$)")  # for whoever runs the fabric
PYTHON = re.compile(
    r"\w\(|(?<![\w?])[a-z_]{2,}=|(?<![\w-])--[a-z]|\b(?:run|fabric|rollfab|model|torch)\.(?!safetensors)[a-z]+(?![\w.])"
)
PUT_IN = "1"
ELSEWHERE = {  # texts by their beginning, and why no client gets them
    "relay.no_cache": "logged",
    "weights.another_dtype": "logged",
    "the collector at": "logged",
    "groups() has waited": "logged",
    "run %r: %d groups": "logged",
    "run %r: another live": "logged",
    "dead ls --run": "logged",
    "it is no http address": "said at the start",
    "no broker: give": "said at the start",
    "the gateway would take keys": "said at the start",
    "run 1 does not exist on this broker: give --model": "said at the start",
    "--dtype 1": "said at a worker's start",
    "start its worker, or its server": "said by a worker",
    "this connection was opened by process": "servers do not fork",
    "give keep=": "said of refill, which no client can ask for",
    "import this room as": "servers have imported it",
    "1 is ragged": "said to programs that read sides",
    "durability=disk needs": "the setting is of the broker's URL, which whoever runs the server gave",
    "the broker took the push, but": "likewise",
    "rollfab runs rm --yes": "a command without its backticks, see BadRow",
    "tensor 1 is placed as": "tensors of torch, and clients give files",
    "tensor 1 is not a plain dense": "likewise",
    "tensors 1 and 1 are tied": "likewise",
    "a 1 is a module": "likewise",
    "publish: group is 1, expected one of": "likewise",
    "1 is no pair of": "likewise",
    "1 cannot be published: give model": "likewise",
    "\numask 077": "a script",
    "Mean of exp": "a metric's description",
    "Estimate of KL": "likewise",
    "give --tls-cert": "logged",
    ", ask at once ": "what is looked for, in the words themselves",
    ", or with a shorter": "likewise",
}


@cache  # faces have files in common
def texts_of(path: Path) -> list[tuple[int, str]]:
    """The texts of a file but its docstrings, each with its line; what is put into them is PUT_IN, or its own text."""
    seen: set[int] = set()
    found = []
    for node in ast.walk(ast.parse(path.read_text())):  # the outer ones first
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            seen.add(id(node.value))
        elif id(node) not in seen and (text := _text(node, seen)) is not None:
            found.append((node.lineno, text))  # type: ignore[attr-defined]
    return found


def _text(node: ast.AST, seen: set[int]) -> str | None:
    """Put the pieces of a text together; None: it is none."""
    seen.add(id(node))
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(each, seen) or PUT_IN for each in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = (_text(each, seen) for each in (node.left, node.right))
        return None if left is None and right is None else (left or PUT_IN) + (right or PUT_IN)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


@pytest.mark.parametrize("face", FACES)
def test_no_text_that_may_reach_a_client_tells_a_step_in_pythons_words(face: str) -> None:
    words, patterns, unsaid = FACES[face]
    left, changed = [], 0
    for path in sorted({each for pattern in patterns for each in ROOT.glob(pattern)}):
        for line, text in texts_of(path):
            if PROSE.search(text) and not text.startswith((*ELSEWHERE, *unsaid)):
                said = words.say(text, "lake")
                changed += said != text
                if PYTHON.search(COMMAND.sub("", said)):
                    left.append(f"{path.relative_to(ROOT)}:{line}: {said}")
    assert not left, "say these in words of both, or add them to the face's words"
    assert changed > 5, "the texts that were looked at are not the library's"


@pytest.mark.parametrize("face", FACES)
def test_every_phrase_that_is_reworded_is_one_of_the_librarys(face: str) -> None:
    words, patterns, _ = FACES[face]
    tables = {ROOT / "api/training/words.py", ROOT / "api/gateway/problems.py"}
    paths = {each for pattern in patterns for each in ROOT.glob(pattern)} - tables
    texts = [text for path in paths for _, text in texts_of(path)]
    assert [each for each in words.phrases if not any(re.search(each, text) for text in texts)] == []


def test_keywords_become_fields_with_values_of_json() -> None:
    for said, told in (
        ("publish with allow_nonfinite=True", 'publish with "allow_nonfinite": true'),
        ("give version=7, for", 'give "version": 7, for'),
        ("raise it, or say when_stale='keep'", 'raise it, or say "when_stale": "keep"'),
        ("a longer timeout=…", 'a longer "wait_s"'),
        ("your own unknown=True and reward='x", "your own unknown=True and reward='x"),
    ):
        assert TRAINING.say(said, "lake") == told
    assert WORDS.say("give version=7, for") == 'give "weight_version": 7, for'
    assert TRAINING.say('Push tasks: run.submit([{"seed": 1}], group_size=8)', "lake").startswith(
        'Push tasks: POST /v1/runs/lake/groups {"tasks": '
    )


def test_what_stands_for_nothing_is_json_s_word_and_what_is_quoted_stays() -> None:
    said = TRAINING.say(
        "run 'None': the run's staleness is None, expected a number, or None; True is none. Try `a True b`"
    )
    assert said == "run 'None': the run's staleness is null, expected a number, or null; true is none. Try `a True b`"
