"""The coding agent of docs/examples: the whole way over the fabric, and its tools under a scripted model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from docs.examples import coder
from docs.examples.coder import CALL_COUNT_MAX, TASKS, TOOLS, Workspace, play

from tests.integration.gateway.exactness import check_exact
from tests.support.processes.fabric_processes import Processes, processes
from tests.support.processes.process_groups import living
from tests.support.until import until

LEAP = TASKS[0]
MENDED = "def is_leap(year):\n    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)\n"
CALL_ID = 100  # the preset's token that begins a tool call
BIAS = 6.0


class ScriptedModel:
    """A mock of the openai client: each answer is the next list of tool calls of a script, then words alone."""

    def __init__(self, *script: list[tuple[str, dict[str, Any]]]) -> None:
        self._script = list(script)
        self.asked: list[list[Any]] = []
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create))

    async def _create(self, *, messages: list[Any], tools: list[Any], **_: Any) -> Any:
        assert tools == TOOLS
        self.asked.append(list(messages))
        chosen = self._script.pop(0) if self._script else []
        calls = [
            SimpleNamespace(id=f"c{index}", function=SimpleNamespace(name=name, arguments=json.dumps(arguments)))
            for index, (name, arguments) in enumerate(chosen)
        ]
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content="", tool_calls=calls))])

    @property
    def told(self) -> list[str]:
        """What tools answered, in order."""
        return [each["content"] for each in self.asked[-1] if isinstance(each, dict) and each["role"] == "tool"]


@pytest.fixture
def work(tmp_path: Path) -> Workspace:
    place = tmp_path / "place"
    place.mkdir()
    return Workspace(place, LEAP)


async def write(work: Workspace, text: str) -> None:
    """Replace the solution."""
    await work.use("write_file", json.dumps({"path": "solution.py", "text": text}))


# ---------------------------------------------------------------- the whole way


@pytest.fixture(scope="module")
def fabric(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    pytest.importorskip("torch")
    with processes(tmp_path_factory.mktemp("coder")) as fabric:
        fabric.start_roles(agent=("--environment", "coder=docs.examples.coder:play"))
        yield fabric


@pytest.mark.redis
@pytest.mark.timeout(180)
def test_what_a_tiny_model_codes_is_recorded_exactly(fabric: Processes) -> None:
    # Given a model of random weights that is pushed to begin tool calls, and knows the names of none
    sampling = {"max_tokens": 2, "seed": 1, "logit_bias": {str(CALL_ID): BIAS}}
    run = fabric.new_run("coder", "coder", is_lively=True, sampling=sampling)
    # When it plays
    run.submit(TASKS, group_size=4, group_ids=["leap", "middle"])
    groups = fabric.collect(run, 2, 120.0)
    # Then every rollout is exact, and is paid for what the code as it was passes
    assert [group.failures for group in groups] == [(), ()]
    paid = {group.group_id: {rollout.reward for rollout in group.rollouts} for group in groups}
    assert paid == {"leap": {2 / 3}, "middle": {1 / 3}}
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        check_exact(rollout, bias={CALL_ID: BIAS})
        assert 1 <= rollout.turn_count <= CALL_COUNT_MAX
        assert rollout.info["success"] is False
    # And some used tools, whose answers they read
    assert max(rollout.turn_count for group in groups for rollout in group.rollouts) > 1


# ---------------------------------------------------------------- the tools


async def test_a_model_that_looks_mends_and_tests_is_paid_in_full() -> None:
    model = ScriptedModel(
        [("list_files", {}), ("read_file", {"path": "solution.py"})],
        [("run_tests", {})],
        [("write_file", {"path": "solution.py", "text": MENDED}), ("run_tests", {})],
    )
    assert await play(LEAP, model) == {"reward": 1.0, "info": {"success": True}}
    files, code, before, written, after = model.told
    assert (files, code, written) == ("solution.py\ntests.txt", LEAP["code"], f"{len(MENDED)} characters written")
    assert '[{"gave": true}, {"gave": true}, {"gave": true}]' in before and "2 of 3 tests pass" in before
    assert "3 of 3 tests pass" in after


async def test_a_model_that_does_nothing_is_paid_for_what_passes_already_and_one_that_never_ends_is_cut_off() -> None:
    look: list[tuple[str, dict[str, Any]]] = [("list_files", {})]
    idle, endless = ScriptedModel(), ScriptedModel(*[look] * 100)
    assert (await play(LEAP, idle))["reward"] == pytest.approx(2 / 3)
    assert (await play(LEAP, endless))["reward"] == pytest.approx(2 / 3)
    assert (len(idle.asked), len(endless.asked)) == (1, CALL_COUNT_MAX)


@pytest.mark.parametrize(
    "path", ["../outside", "/outside", "link", "link/x", "", ".", "sub/../../outside", "pipe", "loop"]
)
async def test_paths_that_leave_the_directory_or_are_no_files_are_refused(
    work: Workspace, path: str, tmp_path: Path
) -> None:
    # Given a file outside, and code that made links to it, a pipe, and a link to itself
    (tmp_path / "outside").write_text("secret")
    await write(work, "import os\nos.symlink('../outside', 'link'); os.mkfifo('pipe'); os.symlink('loop', 'loop')\n")
    await work.test()
    assert "link" in (await work.use("list_files", "{}")).split()
    # Then it is neither read nor written
    place = str(tmp_path / "outside") if path == "/outside" else path
    for name in ("read_file", "write_file"):
        said = await work.use(name, json.dumps({"path": place, "text": "x"}))
        assert "Error: " in said and "secret" not in said
    assert (tmp_path / "outside").read_text() == "secret"
    assert sorted(os.listdir(tmp_path)) == ["outside", "place"]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("no_such_tool", "{}"),
        ("read_file", "{"),
        ("read_file", "[]"),
        ("read_file", "{}"),
        ("read_file", '{"path": 1}'),
        ("read_file", '{"path": "a\\u0000b"}'),
        ("read_file", '{"path": "nowhere.py"}'),
        ("write_file", '{"path": "a.py"}'),
        ("write_file", '{"path": "a.py", "text": 1}'),
    ],
)
async def test_what_is_wrong_with_a_call_is_its_answer(work: Workspace, name: str, arguments: str) -> None:
    said = await work.use(name, arguments)
    assert "Error: " in said or said == "there is no tool no_such_tool"


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("while True:\n    pass\n", "0 of 3"),
        ("x = 'x' * (1 << 30)\n", "MemoryError"),
        ("open('big', 'wb').write(b'x' * (2 << 20))\n", "File too large"),
        ("def is_leap(year)\n", "SyntaxError"),
        ("import os\nos._exit(0)\n", "0 of 3"),
        ("print('[1, 1, 1]')\nraise SystemExit\n", "0 of 3"),
        ("print('{}')\nimport os\nos._exit(0)\n", "0 of 3"),
        ("def is_leap(year):\n    return 1 / 0\n", "ZeroDivisionError"),
        ("def is_leap(year):\n    return object()\n", "0 of 3"),
    ],
)
async def test_code_that_hangs_grows_breaks_or_cheats_passes_no_test(work: Workspace, code: str, told: str) -> None:
    await write(work, code)
    share, said = await work.test()
    assert share == 0.0
    assert told in said and "0 of 3 tests pass" in said


async def test_code_that_sleeps_is_ended(work: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coder, "RUN_S", 0.5)
    await write(work, "import time\ntime.sleep(1000)\n")
    assert await work.test() == (0.0, "\n0 of 3 tests pass")


async def test_what_code_started_ends_with_its_run_and_finds_no_variable(work: Workspace) -> None:
    start = "import os, subprocess\nsubprocess.Popen(['/bin/sleep', '1000'])\n"
    await write(work, start + "print(os.getpgid(0), dict(os.environ).keys() - {'LC_CTYPE'})\n" + MENDED)
    share, said = await work.test()
    assert share == 1.0
    group, _, variables = said.splitlines()[0].partition(" ")
    assert variables == "set()"
    await until(lambda: not living([int(group)]), "the child has ended")
