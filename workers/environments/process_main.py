"""The main program of an environment's or reward function's own process: it calls the code, one call at a time.

- Standard library only, and any Python from 3.8 on: the environment's own interpreter runs this file, and rollfab need
  not be installed there. It imports nothing of rollfab.
- Descriptor 0 is the channel, both ways: a message is a length (4 bytes, big-endian) and JSON; `data_bytes` more bytes
  may follow a request. We move the channel away before we load the environment, and its output goes elsewhere, so it
  cannot spoil the channel.
- If the environment raises, we report the error, and the process goes on. When the channel ends, so does the process.

A world with `async def reset` is called like rollfab's Environment: reset(task, seed), step(action). Any other world is
called like Gymnasium's and GEM's: reset(seed=…) and step(action), with tuples for answers. A coroutine function, a
command (a target that begins with COMMAND), or a taskset of verifiers (TASKSET) is an agent: it plays a whole episode,
and asks the model by itself.
"""

from __future__ import annotations

import faulthandler
import importlib
import inspect
import json
import os
import re
import resource
import select
import shlex
import struct
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

LENGTH = struct.Struct(">I")
TEXT_LENGTH_MAX = 2000
SHOWN_LENGTH_MAX = 200  # of a value within such a text
LEFT_COUNT_MAX = 32  # threads and children after a call; code that leaves more would fill the machine, call by call
TRACEBACK_LENGTH_MAX = 20_000
SAMPLING = (  # the fields of TextSampling: an interpreter that does not know rollfab runs this file too
    "temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty max_tokens stop stop_ids seed "
    "logit_bias guided_json guided_regex guided_tag logprobs prompt_logprobs kept_tokens routed_experts ends_at_eos"
).split()
STEP = ("text", "reward", "terminated", "truncated", "info")
CHAT = ("messages", "tools")
COMMAND = "!"
TASKSET = "@"
LINE_BYTES_MAX = 1 << 20
LOOK_S = 0.05  # between two looks whether a command has ended
PIPE_BYTES = 1 << 16  # that a pipe holds
ADDRESS = re.compile(r"<.+ at 0x[0-9a-f]+>", re.DOTALL)  # how Python shows what has no text of its own
GIVEN = ("task", "seed", "client", "base_url", "key")  # what an agent may take, by the names of its parameters
AGENT_ADVICE = "; if it is an agent, write `async def`: others are made with the run's options, and have reset and step"
NO_OPENAI = "it takes a client, and the package openai is not installed for its interpreter: pip install openai"
PLAYED = ("reward", "info", "truncated")


class Refused(Exception):
    """A request cannot be served: `kind` is load, options or answer."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class UserCode:
    """Holds one world at a time, of one factory; or a reward function, and the decoder of its rollouts."""

    def __init__(self) -> None:
        self._text_bytes_max = self._info_bytes_max = sys.maxsize
        self._factory: Any = None
        self._decode: Any = None
        self._world: Any = None
        self._is_async = False
        self._loop: Any = None
        self._clients: dict[str, Any] = {}  # of the openai package, by base URL: making one takes as long as a call

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Make a requested call; return {"answer": …}, or {"error": …}."""
        try:
            return {"answer": getattr(self, request["call"])(**request["arguments"])}
        except Refused as error:
            return {"error": {"kind": error.kind, "text": str(error)}}
        except BaseException as error:  # noqa: BLE001 - user code: its error ends its call alone
            told = traceback.format_exc()[-TRACEBACK_LENGTH_MAX:]
            return {"error": {"kind": "raised", "text": describe(error), "traceback": told}}

    def load(
        self, target: str, path: list[str], is_first: bool, limits: dict[str, int], decoder: str | None = None
    ) -> dict[str, Any]:
        """Import the target, "module:attr", from `path` or the interpreter's own places; return its stated settings.

        is_first: `path` comes before the interpreter's own places. limits: the most bytes of a text and of an info.
        decoder: names the function that makes rollouts of bytes; given if the target is a reward function.
        """
        self._limits = limits
        own = [each for each in sys.path if each not in path]
        sys.path[:] = [*path, *own] if is_first else [*own, *path]
        if decoder is not None:
            self._factory = find(target)
            self._decode = find(decoder)
            check_function(self._factory)
            return {}
        self._factory = find_environment(target)
        check_agent(self._factory)
        limit_memory(getattr(self._factory, "memory_bytes_max", None))
        names = ("episode_count_max", "isolation", "inline")
        stated = {name: getattr(self._factory, name, None) for name in names}
        return {**stated, "is_agent": is_agent(self._factory)}

    def score(self, task: dict[str, Any], data: bytes) -> float | str:
        """Compute a rollout's reward; if the result is no number, return its text, for the caller's error."""
        reward = self._finish(self._factory(task, self._decode(data)))
        return show(reward) if isinstance(reward, str) else number(reward)

    def make(self, options: dict[str, Any]) -> dict[str, Any]:
        """Make a new world; return its settings."""
        if is_agent(self._factory):
            self._world = Player(self._factory, options, self._clients)
            return {"is_agent": True}
        try:
            self._world = self._factory(**options)
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
                raise  # the constructor itself raised it
            advice = "" if inspect.isclass(self._factory) else AGENT_ADVICE
            raise Refused("options", str(error) + advice) from error
        if not (hasattr(self._world, "reset") and hasattr(self._world, "step")):
            raise Refused("answer", f"{type(self._world).__name__} was made, which has no reset and step")
        self._is_async = inspect.iscoroutinefunction(self._world.reset)
        return settings(self._world if self._is_async else self._factory)

    def reset(self, task: dict[str, Any], seed: int) -> dict[str, Any]:
        """Start the episode; return the first observation."""
        if self._is_async:
            try:
                inspect.signature(self._world.reset).bind(task, seed)
            except TypeError as error:
                form = "an async reset is called as reset(task, seed), one that is not as reset(seed=seed)"
                raise Refused("answer", f"reset cannot be called: {error}; {form}") from error
            answer = self._finish(self._world.reset(task, seed))
            if not hasattr(answer, "text"):
                raise Refused("answer", f"reset gave {show(answer)}, expected an Observation with text")
            row = {"text": answer.text, "info": getattr(answer, "info", {})}
            return self._fit("reset", {**row, **{name: chat_of(answer, name) for name in (*CHAT, "ids")}})
        answer = self._world.reset(seed=seed_of(task, seed))
        if not (isinstance(answer, tuple) and len(answer) == 2):
            raise Refused("answer", f"reset gave {show(answer)}, expected (observation, info)")
        text, info = said("reset", answer[0]), facts("reset", answer[1])
        return self._fit("reset", {"text": text, "info": info, "messages": [], "tools": [], "ids": []})

    def step(self, action: Any) -> dict[str, Any]:
        """Apply an action; return the world's answer to it."""
        answer = self._finish(self._world.step(action))
        if self._is_async:
            if not all(hasattr(answer, name) for name in STEP):
                raise Refused("answer", f"step gave {show(answer)}, expected a Step with text and a dict of info")
            row = {name: getattr(answer, name) for name in STEP}
            row["messages"] = chat_of(answer, "messages")
        elif isinstance(answer, tuple) and len(answer) == len(STEP):
            row = dict(zip(STEP, answer))  # noqa: B905 - Python 3.8
            is_over = bool(row["terminated"] is True or row["truncated"] is True)
            row["text"], row["info"] = said("step", row["text"], is_over), facts("step", row["info"])
            row["messages"] = []
        else:
            form = "(observation, reward, terminated, truncated, info)"
            raise Refused("answer", f"step gave {show(answer)}, expected {form}")
        row.update({name: flag("step", name, row[name]) for name in ("terminated", "truncated")})
        row["reward"] = number(row["reward"])
        return self._fit("step", row)

    def play(self, task: dict[str, Any], seed: int, base_url: str, key: str) -> dict[str, Any]:
        """Let an agent play a whole episode; return its reward (None: it gave none) and info."""
        answer = self._finish(self._world.play(task, seed, base_url, key))
        if answer is None or isinstance(answer, (int, float)):
            answer = {"reward": answer}
        unknown = sorted(set(answer) - set(PLAYED)) if isinstance(answer, dict) else [type(answer).__name__]
        if unknown:
            raise Refused(
                "answer", f"it gave {show(answer)}, expected a reward, None, or a dict of {', '.join(PLAYED)}"
            )
        reward = answer.get("reward")
        reward = None if reward is None else number(reward)
        row: dict[str, Any] = {"text": "", "reward": reward, "info": answer.get("info") or {}, "messages": []}
        return self._fit("play", {**row, "truncated": flag("play", "truncated", answer.get("truncated", False))})

    def _fit(self, what: str, row: dict[str, Any]) -> dict[str, Any]:
        return fit(what, row, self._limits)

    def snapshot(self) -> Any:
        """Return the world's state as plain JSON values."""
        return self._finish(self._world.snapshot())

    def restore(self, snapshot: Any) -> None:
        """Continue from a state."""
        self._finish(self._world.restore(snapshot))

    def close(self) -> None:
        """Close the world and drop it."""
        world, self._world = self._world, None
        if hasattr(world, "close"):
            self._finish(world.close())

    def _finish(self, value: Any) -> Any:
        """Return the value, or the result if it is awaitable; one loop serves every world of this process."""
        if not inspect.isawaitable(value):
            return value
        if self._loop is None:
            import asyncio  # takes 60 ms, which plain worlds save

            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(_awaited(value))


async def _awaited(value: Any) -> Any:
    return await value


def fit(what: str, row: dict[str, Any], limits: dict[str, int]) -> dict[str, Any]:
    """Return the row if it may travel; refuse it where it arose, before any other process has to carry it.

    limits: bytes of text, info and messages, which may hold images; tools and ids have a text's.
    """
    said = [name for name in (*CHAT, "ids") if row.get(name)]
    sizes = (
        ("text", "is", "as UTF-8", "let it be shorter"),
        ("info", "is", "as JSON", "say less in it, or put it into a file and its path there"),
        *((name, "are", "as JSON", "let them be shorter") for name in said),
    )
    for name, verb, form, advice in sizes:
        value, limit = row[name], limits.get(name, limits["text"])
        try:
            is_empty = type(value) is dict and not value  # as most infos are
            told = value if name == "text" else "{}" if is_empty else to_json(value)
            size = len(told if len(told) > limit else told.encode()) if isinstance(told, str) else 0  # refused later
        except UnicodeEncodeError as error:
            raise Refused("answer", f"{what}: its {name} {verb} no Unicode: {describe(error)}") from error
        except Exception as error:  # keys and values are user code; it ends its call alone, as a refused answer
            advice = "give numbers, texts, lists and dicts; of numpy's values .item() or .tolist()"
            raise Refused("answer", f"{what}: its {name} cannot be sent: {describe(error)}; {advice}") from error
        if size > limit:
            text = f"{what}: its {name} {verb} {size:,} bytes {form}, the limit is {limit:,}: {advice}"
            raise Refused("answer", text)
    return row


def chat_of(answer: Any, name: str) -> Any:
    """Return the messages, tools or ids of an answer; none where it says None, or has no such attribute."""
    value = getattr(answer, name, None)
    return [] if value is None else value


def flag(what: str, name: str, value: Any) -> bool:
    """Return what should be True or False as that; 0, 1 and numpy's are taken. Raises Refused: it is neither."""
    if type(value) is bool:
        return value
    try:
        is_flag = not isinstance(value, str) and bool(value == bool(value))
    except Exception:  # noqa: BLE001 - another class's == may raise anything: it is neither
        is_flag = False
    if not is_flag:
        raise Refused("answer", f"{what}: its {name} is {show(value)}, expected True or False")
    return bool(value)


def said(what: str, observation: Any, is_over: bool = False) -> str:
    """Return an observation as text. is_over: nobody reads it any more, so there may be none.

    Raises Refused: it is nothing, as of a function that forgot to return it, or bytes, which say no encoding; or it
        would be read as where something lies in memory, as a method that was not called, or a generator: the policy
        would learn from that, and no other process could replay it.
    """
    if observation is None and is_over:
        return ""
    if isinstance(observation, str):
        return str(observation)
    if observation is None or isinstance(observation, (bytes, bytearray)):
        raise Refused("answer", f"{what} gave {show(observation)} as its observation, expected a text")
    text = str(observation)
    if inspect.isroutine(observation) or inspect.isclass(observation) or ADDRESS.search(text):
        raise Refused("answer", f"{what} gave {show(observation)} as its observation, which no text says; give a text")
    return text


def seed_of(task: dict[str, Any], seed: int) -> int:
    """Return the task's own seed, or else the trajectory's. Raises Refused: the task's is no whole number."""
    stated = task.get("seed", seed)
    try:
        drawn = int(stated)
        if isinstance(stated, str) or drawn == stated:
            return drawn
    except (TypeError, ValueError, OverflowError):
        pass
    told = "expected a whole number; a task without one is given its trajectory's"
    raise Refused("answer", f"the task's seed is {show(stated)}, {told}")


def facts(what: str, info: Any) -> dict[str, Any]:
    """Return the info of a reset or step as a dict. Raises Refused: it is none, as where a function forgot it."""
    try:
        return dict(info)
    except (TypeError, ValueError) as error:
        told = f"{what} gave {show(info)} as its info, expected a dict; {{}} where there is nothing to say"
        raise Refused("answer", told) from error


def number(reward: Any) -> Any:
    """Return a reward as a float; if it is no number, a text that shows it, for the agent's error."""
    if isinstance(reward, (str, bytes, bytearray)):  # float() would accept a text of digits
        return reward[:TEXT_LENGTH_MAX] if isinstance(reward, str) else show(reward)
    try:
        return float(reward)
    except (TypeError, ValueError, OverflowError):
        return show(reward)


def to_json(value: Any) -> str:
    """Write a value as JSON without spaces, as all that travels is written."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def is_agent(factory: Any) -> bool:
    """Tell whether what was loaded plays by itself."""
    return isinstance(factory, Command) or inspect.iscoroutinefunction(factory)


def check_agent(found: Any) -> None:
    """Raise Refused if `found` is an agent that could play no episode, or is meant for one and is none."""
    if not inspect.isfunction(found):
        return
    taken = inspect.signature(found).parameters
    if not is_agent(found) and "task" in taken and any(name in taken for name in ("client", "base_url", "key")):
        told = "it takes what agents take: if it is an agent, write `async def`, and return the reward"
        raise Refused("load", told)
    if is_agent(found) and "client" in taken and not has_module("openai"):
        raise Refused("load", NO_OPENAI)


def has_module(name: str) -> bool:
    """Tell whether a module could be imported, without doing so."""
    from importlib.util import find_spec

    return sys.modules[name] is not None if name in sys.modules else find_spec(name) is not None


class Player:
    """An agent: a coroutine function, called with those of GIVEN that it takes, and with its options; or a command."""

    def __init__(self, function: Any, options: dict[str, Any], clients: dict[str, Any]) -> None:
        self._function = function
        self._options = options
        self._clients = clients
        taken = inspect.signature(function).parameters
        takes_any = any(each.kind is each.VAR_KEYWORD for each in taken.values())
        self._names = [name for name in GIVEN if name in taken]
        wrong = sorted(name for name in options if name in GIVEN or not (takes_any or name in taken))
        missing = [
            name
            for name, each in taken.items()
            if each.default is each.empty and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
            if name not in GIVEN and name not in options
        ]
        if wrong:
            raise Refused("options", f"{wrong[0]!r} is no option of it")
        if missing:
            raise Refused(
                "options",
                f"{missing[0]!r} is missing: it is given {', '.join(GIVEN)}, "
                "whatever else it takes are options of the run (environment_options)",
            )

    async def play(self, task: dict[str, Any], seed: int, base_url: str, key: str) -> Any:
        """Play one episode."""
        given = {"task": task, "seed": seed, "base_url": base_url, "key": key}
        if "client" not in self._names:
            answer = self._function(**{name: given[name] for name in self._names}, **self._options)
            return await answer if inspect.isawaitable(answer) else answer
        try:
            openai = importlib.import_module("openai")
        except ImportError as error:
            raise Refused("load", NO_OPENAI) from error
        if base_url not in self._clients:
            self._clients[base_url] = openai.AsyncOpenAI(base_url=base_url, api_key=key)
        given["client"] = self._clients[base_url].with_options(api_key=key)
        return await self._function(**{name: given[name] for name in self._names}, **self._options)


class Command:
    """An agent that is a command, started where its agent worker was.

    It finds the model in OPENAI_BASE_URL and OPENAI_API_KEY, the task in the JSON file that ROLLFAB_TASK names, the
    trajectory's seed in ROLLFAB_SEED, and a directory of its own, which is removed afterwards, in ROLLFAB_DIRECTORY.
    If the last line that it prints is a JSON object, that says the reward; one that begins as an object must be one.
    """

    def __init__(self, line: str) -> None:
        self._words = shlex.split(line)

    def __call__(self, task: dict[str, Any], seed: int, base_url: str, key: str) -> Any:
        """Run the command to its end."""
        import shutil
        import subprocess
        import tempfile

        own = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": key, "ROLLFAB_SEED": str(seed)}
        directory = tempfile.mkdtemp()
        try:
            place, scratch = os.path.join(directory, "task.json"), os.path.join(directory, "scratch")
            os.mkdir(scratch)
            with open(place, "w") as file:
                json.dump(task, file)
            variables = {**os.environ, **own, "ROLLFAB_TASK": place, "ROLLFAB_DIRECTORY": scratch}
            none, pipe = subprocess.DEVNULL, subprocess.PIPE
            with subprocess.Popen(self._words, env=variables, stdin=none, stdout=pipe) as process:
                last, is_cut = last_line(pieces_of(process))
        finally:
            shutil.rmtree(directory, ignore_errors=True)  # what it left in the background may still write there
        if process.returncode:
            raise RuntimeError(f"{self._words[0]} ended with code {process.returncode}")
        if is_cut and last.startswith(b"{"):
            told = f"the last line that it printed has more than {LINE_BYTES_MAX:,} bytes: say less in its info"
            raise Refused("answer", told)
        try:
            answer = json.loads(last)
        except ValueError as error:
            if last.strip().startswith(b"{"):
                line = show(last.decode(errors="replace").strip())
                raise Refused("answer", f"the last line that it printed, {line}, is no JSON: {error}") from error
            return None
        return answer if isinstance(answer, dict) else None


def pieces_of(process: Any) -> Iterator[bytes]:
    """Yield what a command prints, by lines or parts of long ones, until it has ended.

    What it has left in the background may hold its output open for ever, and is not waited for.
    """
    descriptor, rest, left = process.stdout.fileno(), b"", PIPE_BYTES
    while left > 0:
        has_ended = process.poll() is not None  # before the look: what it has printed by then is in the pipe
        if not select.select([descriptor], [], [], 0 if has_ended else LOOK_S)[0]:
            if has_ended:
                break
            continue
        data = os.read(descriptor, LINE_BYTES_MAX)
        if not data:
            break
        left -= len(data) if has_ended else 0  # no pipe holds more; who is left may print for ever
        *lines, rest = (rest + data).split(b"\n")
        lines = [line + b"\n" for line in lines]
        if len(rest) >= LINE_BYTES_MAX:
            lines, rest = [*lines, rest], b""
        yield from lines
    if rest:
        yield rest


def last_line(pieces: Iterator[bytes]) -> tuple[bytes, bool]:
    """Pass what a command prints on, to be logged; return its last line that is not empty, and whether that was cut."""
    last, is_cut, is_begun = b"", False, False
    for piece in pieces:
        os.write(sys.stdout.fileno(), piece)
        if is_begun:
            is_cut = True
        elif piece.strip():
            last, is_cut = piece, False
        is_begun = not piece.endswith(b"\n")
    return last, is_cut


def find_environment(target: str) -> Any:
    """Make or import what a target names."""
    if target.startswith(COMMAND):
        return Command(target[len(COMMAND) :])
    return find_taskset(target[len(TASKSET) :]) if target.startswith(TASKSET) else find(target)


def find_taskset(name: str) -> Any:
    """Return the agent that plays a taskset of verifiers, made by the file beside this one."""
    from importlib.util import module_from_spec, spec_from_file_location

    if not has_module("verifiers"):
        told = (
            "the package verifiers is not installed for its interpreter: pip install verifiers there, or name another"
        )
        raise Refused("load", told + ": NAME=/path/to/python:verifiers:" + name)
    place = os.path.join(os.path.dirname(os.path.abspath(__file__)), "verifiers_plugin.py")
    spec: Any = spec_from_file_location("rollfab_verifiers_plugin", place)
    plugin = module_from_spec(spec)
    spec.loader.exec_module(plugin)
    try:
        return plugin.taskset(name)
    except Exception as error:  # the taskset is user code; it ends its call alone, as a refused load
        raise Refused("load", "taskset " + name + " of verifiers: " + describe(error)) from error


def find(target: str) -> Any:
    """Import the object that "module:attr" names."""
    module, _, attributes = target.partition(":")
    try:
        found = importlib.import_module(module)
        for attribute in attributes.split("."):
            found = getattr(found, attribute)
    except (ImportError, AttributeError) as error:
        raise Refused("load", str(error)) from error
    return found


def check_function(found: Any) -> None:
    """Raise Refused unless `found` can be called as a reward function."""
    expected = "a reward function is score(task: dict, rollout: Rollout) -> float"
    if not callable(found) or isinstance(found, type):
        raise Refused("load", f"{show(found)} is no function: {expected}")
    if inspect.isgeneratorfunction(found) or inspect.isasyncgenfunction(found):
        raise Refused("load", f"it is a generator: {expected}")
    try:
        signature = inspect.signature(found)
    except ValueError:  # a function written in C may not tell its signature
        return
    try:
        signature.bind({}, None)
    except TypeError as error:
        raise Refused("load", f"it takes {signature}: {expected}") from error


def is_crowded() -> bool:
    """Tell whether the code has left more threads and child processes behind than a library would."""
    tasks = "/proc/self/task"
    try:
        threads = os.listdir(tasks)
        count = len(threads)
        for thread in threads:
            with open(tasks + "/" + thread + "/children") as children:
                count += len(children.read().split())
    except OSError:  # no such place on this system, or a thread that ended meanwhile
        count = threading.active_count()
    return count > LEFT_COUNT_MAX


def limit_memory(limit: Any) -> None:
    """Lower the limit of memory that this process may write to, to the class's own limit if it has one."""
    if limit is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = int(limit) if hard == resource.RLIM_INFINITY else min(int(limit), hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def settings(owner: Any) -> dict[str, Any]:
    """Read the settings that a class or a world states; None for each that it does not state. The agent checks them."""
    stated = {name: getattr(owner, name, None) for name in ("recovery", "turn_count_max", "sampling", "tool_choice")}
    sampling = stated["sampling"]
    if isinstance(sampling, Mapping):
        stated["sampling"] = dict(sampling)
    else:
        named = {name: getattr(sampling, name) for name in SAMPLING if hasattr(sampling, name)}
        stated["sampling"] = named or sampling
    for name, value in stated.items():
        try:
            json.dumps(value)
        except Exception as error:  # user code; it ends its call alone, as a refused answer
            raise Refused(
                "answer", f"{name} is {show(value)}, expected plain JSON values: {describe(error)}"
            ) from error
    return stated


def describe(error: BaseException) -> str:
    """Describe an exception by kind and text, in the words that an agent uses for its own environments."""
    try:
        if isinstance(error, Exception):
            return f"{type(error).__name__}: {error}"[:TEXT_LENGTH_MAX]
        return f"RuntimeError: {error!r} left the code that was called"[:TEXT_LENGTH_MAX]
    except BaseException:  # noqa: BLE001 - str() of a user's error; the report goes on without its text
        return f"{type(error).__name__} (its text cannot be read)"


def show(value: Any) -> str:
    """Show a value in an error's text, cut, even if its own repr raises."""
    try:
        text = repr(value)
        return text if len(text) <= SHOWN_LENGTH_MAX else text[:SHOWN_LENGTH_MAX] + "…"
    except Exception:  # noqa: BLE001 - repr() of a user's value; the report goes on with its type
        return f"a {type(value).__name__} that cannot be shown"


# ---- the channel


def receive(channel: int) -> dict[str, Any] | None:
    """Receive the next request; None if the agent is gone."""
    head = read_exactly(channel, LENGTH.size)
    body = head and read_exactly(channel, LENGTH.unpack(head)[0])
    if not body:
        return None
    request: dict[str, Any] = json.loads(body)
    if request.get("data_bytes"):
        request["arguments"]["data"] = read_exactly(channel, request["data_bytes"])
    return request


def read_exactly(channel: int, size: int) -> bytes:
    """Read `size` bytes; return none if the channel has ended."""
    parts = []
    while size:
        part = os.read(channel, size)
        if not part:
            return b""
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def send(channel: int, what: str, head: dict[str, Any], reply: dict[str, Any], bytes_max: int) -> None:
    """Send a reply to a call, or an error if the reply cannot be sent; the head holds the number of the request."""
    try:
        data = to_json({**head, **reply}).encode("utf-8", "surrogatepass")
    except Exception as error:  # noqa: BLE001 - its keys and values are user code; the call is told so
        text = f"{what}: its answer cannot be sent: {describe(error)}; give plain JSON values"
        data = json.dumps({**head, "error": {"kind": "answer", "text": text}}).encode()
    if len(data) > bytes_max:
        text = f"{what}: its answer is {len(data):,} bytes as JSON, the limit is {bytes_max:,}: say less in it"
        data = json.dumps({**head, "error": {"kind": "answer", "text": text}}).encode()
    view = memoryview(LENGTH.pack(len(data)) + data)
    while view:
        view = view[os.write(channel, view) :]


def main() -> None:
    """Answer requests until the channel ends. Command-line argument: the most bytes of an answer."""
    del sys.path[0]  # this file's directory: its neighbours must not be found as top-level modules
    channel = os.dup(0)  # children of the environment do not inherit it
    os.register_at_fork(after_in_child=lambda: os.close(channel))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    faulthandler.enable()  # SIGSEGV, and the SIGABRT that a hung process gets, leave a stack on stderr
    code = UserCode()
    while True:
        request = receive(channel)
        if request is None:
            os._exit(0)  # the environment's threads do not hold it up
        number = request.get("number")
        reply = code.answer(request)
        if request["call"] == "score" and is_crowded():
            reply["is_used_up"] = True
        send(channel, request["call"], {"number": number}, reply, int(sys.argv[1]))


if __name__ == "__main__":
    main()
