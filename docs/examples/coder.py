"""A small coding agent: by tool calls, in an empty directory, it mends a Python function until its tests pass.

    rollfab up --environment coder=docs.examples.coder:play       # beside it: pip install openai
    fabric.run("coder", model="…", environment="coder", sampling={"max_tokens": 1024}).submit(TASKS, group_size=8)

What the sandbox is: no tool takes a path that leaves the directory. What the policy wrote runs in a process of its own,
with limits of time, memory and file size, and without our variables; its process group ends with it. What tests expect
never enters that process, so that printing or exiting passes none. Copying from tests.txt does.
What it is not: a wall. That process runs as the agent's user: it may read and write this user's files, use the network,
look into this process (which holds the session's key), and leave processes behind. What holds then is what holds in all
agents: docs/environments.md, docs/security.md. A policy that you do not trust wants `--run-as`, or a container.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

CALL_COUNT_MAX = 12
RUN_S = 20.0  # a new Python on a busy machine takes seconds
SIZE_MAX = 16_384  # characters of a file that is read or written, and of what a tool answers
LEAP = "def is_leap(year):\n    return year % 4 == 0\n"
MIDDLE = "def middle(text):\n    return text[1:-2]\n"
TASKS: list[dict[str, Any]] = [  # a test: arguments, and what the function is to give
    {"function": "is_leap", "code": LEAP, "tests": [[[2024], True], [[1900], False], [[2000], True]]},
    {"function": "middle", "code": MIDDLE, "tests": [[["abcd"], "bc"], [["xyz"], "y"], [["ab"], ""]]},
]
RUNNER = """
import json, resource, sys
for name, most in ((resource.RLIMIT_CPU, 3), (resource.RLIMIT_AS, 256 << 20), (resource.RLIMIT_FSIZE, 1 << 20)):
    resource.setrlimit(name, (most, most))
sys.path.insert(0, ".")
(name, calls), answers = json.loads(sys.argv[1]), []
function = getattr(__import__("solution"), name)
for arguments in calls:
    try:
        answers.append({"gave": function(*arguments)})
    except Exception as error:
        answers.append({"raised": repr(error)})
print("\\n" + json.dumps(answers, default=repr))
"""


def _tool(name: str, about: str, *parameters: str) -> dict[str, Any]:
    properties = {each: {"type": "string"} for each in parameters}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}


TOOLS = [
    _tool("list_files", "Names all files."),
    _tool("read_file", "Returns the text of a file.", "path"),
    _tool("write_file", "Writes a file, in place of what it had.", "path", "text"),
    _tool("run_tests", "Runs the tests on solution.py."),
]


async def play(task: dict[str, Any], client: Any) -> dict[str, Any]:
    """Let the policy work until it says something without a call; the reward is the share of tests that pass then."""
    with tempfile.TemporaryDirectory(prefix="coder-") as place:
        work = Workspace(Path(place), task)
        messages: list[Any] = [{"role": "user", "content": f"Mend {task['function']} in solution.py."}]
        for _ in range(CALL_COUNT_MAX):
            reply = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
            messages.append(message := reply.choices[0].message)
            for call in message.tool_calls or []:
                said = await work.use(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": said[:SIZE_MAX]})
            if not message.tool_calls:
                break
        share, _ = await work.test()
    return {"reward": share, "info": {"success": share == 1.0}}


class Workspace:
    """A directory, and the tools that work in it."""

    def __init__(self, place: Path, task: dict[str, Any]) -> None:
        self._place, self._task = place.resolve(), task
        tests = "".join(f"{task['function']}(*{arguments}) == {wanted!r}\n" for arguments, wanted in task["tests"])
        for name, text in (("solution.py", task["code"]), ("tests.txt", tests)):
            (self._place / name).write_text(text)

    async def use(self, name: str, arguments: str) -> str:
        """Use a tool; what is wrong with its use is its answer."""
        try:
            given = json.loads(arguments or "{}")
            if name == "list_files":
                return "\n".join(sorted(str(each.relative_to(self._place)) for each in self._place.rglob("*")))
            if name == "read_file":
                with self._path(given["path"]).open(errors="replace") as file:
                    return file.read(SIZE_MAX)
            if name == "write_file":
                return f"{self._path(given['path']).write_text(given['text'][:SIZE_MAX])} characters written"
            return (await self.test())[1] if name == "run_tests" else f"there is no tool {name}"
        except (OSError, RuntimeError, ValueError, LookupError, TypeError) as error:
            return f"{type(error).__name__}: {error}"

    def _path(self, path: str) -> Path:
        """Return the place of a file, at the end of all links. Raises ValueError: outside, or no file."""
        found = (self._place / path).resolve()
        if not found.is_relative_to(self._place) or (found.exists() and not found.is_file()):
            raise ValueError(f"{path} is no file of this directory")
        return found

    async def test(self) -> tuple[float, str]:
        """Run the tests; return the share that passes, and what was printed: in its last line what each call gave."""
        tests = self._task["tests"]
        asked = json.dumps([self._task["function"], [arguments for arguments, _ in tests]])
        with tempfile.TemporaryFile() as said:
            streams: dict[str, Any] = {"stdin": asyncio.subprocess.DEVNULL, "stdout": said, "stderr": said}
            words = (sys.executable, "-IBc", RUNNER, asked)
            process = await asyncio.create_subprocess_exec(
                *words, **streams, cwd=self._place, env={}, start_new_session=True
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), RUN_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it started, too
            await process.wait()
            said.seek(0)
            told = said.read().decode(errors="replace").strip()
        try:
            answers = list(json.loads(told.rpartition("\n")[2]))
        except (ValueError, TypeError):  # it ended before, or printed last itself
            answers = []
        passed = sum(answer == {"gave": wanted} for (_, wanted), answer in zip(tests, answers, strict=False))
        return passed / len(tests), f"{told[-2000:]}\n{passed} of {len(tests)} tests pass"
