"""The changes that docs/changing.md shows are made as they stand there, in a copy, and the tests that it names pass."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.test_house import ROOT, source_files

DOC = (ROOT / "docs/changing.md").read_text("utf-8")
EPISODES = "tests/unit/workers/agent/test_episode.py"
ENGINES = "tests/integration/engines/test_engine_contract.py"
# Of each part of the page: where its blocks go, in their order. A pattern: after what it finds, or in the place of what
# it finds as "old"; "": at the end.
PLACES: dict[str, list[tuple[str, str]]] = {
    "Add an environment": [
        ("workers/environments/games/double.py", ""),
        ("pyproject.toml", r'\[project\.entry-points\."rollfab\.environments"\]\n'),
        ("tests/unit/workers/environments/test_environments.py", ""),
    ],
    "Add a field to a rollout": [
        ("fabric/contract/records.py", r"class Rollout\((?:.|\n)*?(?=\n    (?:def|@))"),
        ("workers/agent/transcript.py", r"class Transcript:(?:.|\n)*?self\._tokenizer = tokenizer\n"),
        ("workers/agent/transcript.py", r'def add_turn\(.*\n        """.*\n'),
        ("workers/agent/episode.py", r"(?:.|\n)*async def _made\((?:.|\n)*?return Rollout\(\n"),
        (EPISODES, ""),
    ],
    "Add a transition": [
        ("fabric/queue/lua/rollouts/postpone_group.lua", ""),
        ("fabric/ports/queue.py", r'class RolloutStream\(Protocol\):\n    """.*"""\n'),
        ("fabric/queue/rollouts.py", r"class RedisRolloutStream:(?:.|\n)*?(?=\n    async def )"),
        ("tests/contracts/test_groups.py", ""),
    ],
    "Add a rule to the guard": [
        ("fabric/rules/serving/guard.py", r"    stale_s: .*\n"),
        ("fabric/rules/serving/guard.py", r"(?:.|\n)*(?=    room = _room\()"),
        ("tests/unit/fabric/rules/serving/test_guard.py", ""),
    ],
    "Add an engine": [
        ("workers/engines/mine/engine.py", ""),
        ("deploy/roles/engines.py", r"(?P<old>ENGINES = .*\n)"),
        ("deploy/roles/engines.py", r'def new_engine\((?:.|\n)*?    """\n'),
        (ENGINES, r"def new_engine\((?:.|\n)*?import TransformersConfig, .*\n"),
        (ENGINES, r"(?P<old>@pytest\.fixture\(params=\[KIND\].*\n)(?=def kind)"),
    ],
}
TESTS = {
    "Add an environment": ["tests/unit/workers/environments/test_environments.py", "tests/house/test_house.py"],
    "Add a field to a rollout": [EPISODES, "tests/unit/fabric/contract"],
    "Add a transition": [
        "tests/contracts/test_groups.py",
        "-k",
        "not redis",
        "tests/unit/fabric/queue/test_script_keys.py",
    ],
    "Add a rule to the guard": ["tests/unit/fabric/rules/serving/test_guard.py"],
    "Add an engine": [ENGINES, "tests/unit/deploy/roles", "-k", "not test_engine_contract or mine"],
}


def blocks_of(title: str) -> list[str]:
    """The blocks of code of a part, without what indents them."""
    part = DOC.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]
    found = re.findall(r"^( *)```\w+\n((?:.|\n)*?)^ *```$", part, re.MULTILINE)
    return ["".join(line[len(indent) :] for line in text.splitlines(keepends=True)) for indent, text in found]


def pieces_of(title: str) -> list[str]:
    """The same, one for each place: of a block with lines for two functions, each; of a call, the argument."""
    pieces: list[str] = []
    for block in blocks_of(title):
        if "# in Transcript.__init__" in block:
            pieces += block.splitlines(keepends=True)
        elif block.startswith("Rollout("):
            pieces.append(block.splitlines(keepends=True)[2])
        elif "await trainer." not in block:  # a line for another test of the same
            pieces.append(block)
    return pieces


def put(root: Path, place: str, pattern: str, text: str) -> None:
    """Put text into a file of the copy: behind a pattern, as deep as what is there; for a line of it; or at its end."""
    path = root / place
    before = path.read_text("utf-8") if path.exists() else ""
    if not pattern:
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{before}\n\n{text}" if before else text, "utf-8")
        return
    found = re.search(pattern, before)
    assert found is not None, f"{place}: {pattern}"
    if "old" in found.groupdict():
        path.write_text(before[: found.start("old")] + text + before[found.end("old") :], "utf-8")
        return
    start = found.end()
    if place.endswith(".py") and not text.startswith(" "):
        line = before[:start].rstrip("\n").rsplit("\n", 1)[-1]
        deep = "    " if pattern.startswith("class R") else re.match(" *", line)[0]  # type: ignore[index]
        deep += "    " if line.rstrip().endswith("(") else ""
        text = "".join(f"{deep}{each}" if each.strip() else each for each in text.splitlines(keepends=True))
    path.write_text(
        f"{before[:start]}\n{text}{before[start:]}"
        if before[start : start + 1] == "\n"
        else f"{before[:start]}{text}{before[start:]}",
        "utf-8",
    )


@pytest.mark.slow
@pytest.mark.timeout(170)
@pytest.mark.parametrize("title", PLACES)
def test_a_change_is_made_as_it_stands_there(title: str, tmp_path: Path) -> None:
    # Given a copy, and the change made in it
    for each in source_files():
        (tmp_path / each).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / each, tmp_path / each)
    for room in (each for each in (ROOT / "src/rollfab").iterdir() if each.is_symlink()):
        target = tmp_path / "src/rollfab" / room.name
        target.unlink(missing_ok=True)
        target.symlink_to(os.readlink(room))
    pieces = pieces_of(title)
    assert len(pieces) == len(PLACES[title])
    for (place, pattern), text in zip(PLACES[title], pieces, strict=True):
        put(tmp_path, place, pattern, text)
    # When the tests run that are named there
    variables = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
    words = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-m", "not slow", *TESTS[title]]
    done = subprocess.run(words, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    # Then they pass, the new one among them
    assert done.returncode == 0, done.stdout[-6000:]
    (name,) = re.findall(r"def test_\w+|\bmine\b", pieces[-1])
    name = name.removeprefix("def ")
    assert re.search(rf"{name}\S* PASSED", done.stdout), name
