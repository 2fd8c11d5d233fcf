"""Tasksets of the package verifiers, as agents that play by themselves: docs/worlds.md.

An environment's process loads this file by its path, in an interpreter that has verifiers: it imports nothing of
rollfab, which need not be installed there.

- verifiers does all that it does in its own evaluation: its environment runs the episode, its client asks the model,
  its rewards score. Only the model is ours: an OpenAI-compatible session.
- The worker's operator names the taskset and its settings. A run's tasks are rows, which are data.
- A role without a harness and a runtime of its own gets verifiers' chat loop with tools (its "null" harness), run in
  this process: verifiers would start an interpreter for each user's turn, made with uv from an index.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator
from types import ModuleType
from typing import Any

__all__ = ["taskset"]

TOML = ".toml"
CHAT = "rollfab-chat"  # the id of our harness; verifiers finds a plugin as the module of this name
KEY = "ROLLFAB_SESSION_API_KEY"  # verifiers keeps variables with API_KEY in their names from what it starts
ROW_COUNT_MAX = 1_000_000  # read to come to a row by its number: some tasksets never end
SPENT = "budget_exhausted"  # the session's code for a trajectory that has had all its turns
Play = Callable[..., Awaitable[dict[str, Any]]]


def taskset(name: str) -> Play:
    """Return the agent that plays a taskset: by its id, or as a TOML file describes it, in verifiers' own form.

    Raises:
        ValueError: its settings are none, or ask for what one session cannot be.
    """
    from verifiers.v1.utils.loaders import load_environment

    sys.modules[CHAT.replace("-", "_")] = _chat_plugin()
    env = load_environment(_config(name))
    rows = _Rows(env)
    _let_servers_find(type(env.taskset).__module__)
    served: list[Any] = []  # what serves all episodes of this process, and ends with it
    names = (f"{KEY}_{count}" for count in itertools.count())  # verifiers keeps a client for each, with its key

    async def play(task: dict[str, Any], seed: int, base_url: str, key: str) -> dict[str, Any]:
        from verifiers.v1.clients import EvalClientConfig, ModelContext
        from verifiers.v1.types import SamplingConfig

        row = rows.find(task)
        random.seed(seed)  # games draw from it: an agent that begins again elsewhere meets the same world
        client = EvalClientConfig(base_url=base_url, api_key_var=next(names))
        if not served:
            serving = env.serving()
            await serving.__aenter__()
            served.append(serving)
        os.environ[client.api_key_var] = key
        try:
            episode = await env.run_episode(row, ModelContext(client=client, model="policy", sampling=SamplingConfig()))
        finally:
            del os.environ[client.api_key_var]
        return _played(episode)

    return play


def _let_servers_find(module: str) -> None:
    """Let the servers of its tools, which verifiers starts elsewhere, find a taskset that lies in our directory."""
    here = os.getcwd()
    place = os.path.abspath(getattr(sys.modules[module], "__file__", None) or os.sep)
    if place.startswith(here + os.sep) and "site-packages" not in place:
        own = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = here + (os.pathsep + own if own else "")


def _config(name: str) -> Any:
    """Return the environment's config, with our harness for roles that have none. Raises ValueError."""
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import default_harness_id, env_config_type

    stated = _stated(name)
    ident = stated["taskset"]["id"]
    kind = env_config_type(ident, stated.get("id") or "")
    roles = {role: field.default for role, field in kind.model_fields.items() if role in _roles(kind)}
    stated.setdefault("interception", {"type": "server"})
    for role, default in roles.items():
        own = stated.setdefault(role, {})
        if isinstance(own, dict) and not {"harness", "runtime"} & own.keys() and default.harness is None:
            own["runtime"] = {"type": "subprocess"}
            if default_harness_id(ident) == "bash":  # verifiers' own default: the taskset brings none
                own["harness"] = {"id": CHAT}
    config = kind.model_validate(stated)
    asking = [role for role, own in agent_config_fields(config).items() if own.client is None]
    if len(asking) != 1:
        raise ValueError(
            f"of the roles {', '.join(roles)} these would be the policy: {', '.join(asking) or 'none'}; a trajectory "
            "has one: give every other role a model of its own, [env.ROLE.client] in a TOML file"
        )
    return config


def _stated(name: str) -> dict[str, Any]:
    """Return an environment's settings as they are written. Raises ValueError."""
    if not name.endswith(TOML):
        return {"taskset": {"id": name}}
    import tomllib

    try:
        with open(name, "rb") as file:
            written = tomllib.load(file)
    except ValueError as error:
        why = "it is no UTF-8 text" if isinstance(error, UnicodeError) else error
        raise ValueError(f"{name} is no TOML: {why}. Mend the file there") from error
    stated = written.get("env")
    stated = stated if isinstance(stated, dict) else {}
    chosen = stated.get("taskset")
    if not (isinstance(chosen, dict) and isinstance(chosen.get("id"), str) and chosen["id"]):
        raise ValueError(f'{name} names no taskset: write [env.taskset] and id = "…" in it')
    return stated


def _roles(kind: Any) -> list[str]:
    from verifiers.v1.configs.agent import AgentConfig

    return [role for role, field in kind.model_fields.items() if isinstance(field.default, AgentConfig)]


class _Rows:
    """Makes verifiers' tasks of a run's: {"idx": n}, or a row as its model_dump(mode="json") wrote it."""

    def __init__(self, env: Any) -> None:
        self._taskset = env.taskset
        self._kind = type(env.taskset).task_type()
        self._settings = env.config.taskset.task
        self._coming: Iterator[Any] | None = None
        self._rows: list[Any] = []

    def find(self, task: dict[str, Any]) -> Any:
        """Return verifiers' task. Raises ValueError: there is none."""
        if set(task) == {"idx"}:
            return self._at(task["idx"])
        kind = self._kind.data_type()
        unknown = sorted(set(task) - set(kind.model_fields))
        if not task or (unknown and kind.model_config.get("extra") != "allow"):
            told = f"{unknown[0]!r} is no field of {kind.__name__}" if task else "the task is empty"
            raise ValueError(
                f'{told}: push {{"idx": 0}} for the taskset\'s first row, or a whole row as '
                'task.data.model_dump(mode="json") writes it'
            )
        return self._kind(kind.model_validate(task), self._settings)

    def _at(self, index: Any) -> Any:
        if type(index) is not int or not 0 <= index < ROW_COUNT_MAX:
            raise ValueError(f"idx is {index!r:.100}, expected a whole number from 0 to {ROW_COUNT_MAX - 1:,}")
        if self._coming is None:
            self._coming = iter(self._taskset)
        while len(self._rows) <= index:
            row = next(self._coming, None)
            if row is None:
                raise ValueError(f"idx is {index}, and the taskset has {len(self._rows)} rows, of which 0 is the first")
            self._rows.append(row)
        return self._rows[index]


def _played(episode: Any) -> dict[str, Any]:
    """Return what an agent returns. Raises RuntimeError: the episode failed, or is no one trajectory."""
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise RuntimeError(f"verifiers: {errors[-1].type}: {errors[-1].message}" if errors else "verifiers: no cause")
    if len(traces) != 1:
        raise RuntimeError(
            f"environment {episode.env.id} made {len(traces)} traces to train on, and a trajectory is one: "
            "choose an environment of one agent; a run's group_size samples a task several times"
        )
    (trace,) = traces
    rewards = {name: None if reward is None else reward.value for name, reward in trace.rewards.items()}
    told = {"rewards": rewards, "metrics": dict(trace.metrics), "stop": trace.stop_condition, "key": trace.task.key}
    return {"reward": trace.reward, "info": {"verifiers": told}, "truncated": trace.is_truncated or trace.is_timeout}


def _chat_plugin() -> ModuleType:
    """Make the module that verifiers imports as the harness CHAT."""
    from verifiers.v1.harnesses.null.harness import NullHarness
    from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE

    program: dict[str, Any] = {"__name__": "rollfab_chat_program"}
    exec(compile(CHAT_PROGRAM_SOURCE, "<verifiers' chat program>", "exec"), program)
    program["read"] = program["parse_args"]

    class Chat(NullHarness):  # type: ignore[misc]
        """verifiers' chat loop, without a process of its own. Its contract allows that (Harness.launch)."""

        async def setup(self, runtime: Any) -> None:
            """Leave out what makes an interpreter for the loop."""

        async def launch(self, ctx: Any, trace: Any, runtime: Any, *rest: Any, **named: Any) -> Any:
            """Run the loop to its end."""
            return await super().launch(ctx, trace, _Here(runtime, trace, program), *rest, **named)

    plugin = ModuleType(CHAT.replace("-", "_"))
    plugin.Chat, plugin.__all__ = Chat, ["Chat"]  # type: ignore[attr-defined]
    return plugin


def _read(parse_args: Callable[[], Any], words: list[str]) -> Any:
    """Return what the program reads of these words."""
    own, sys.argv = sys.argv, [CHAT, *words]
    try:
        return parse_args()
    finally:
        sys.argv = own


class _Here:
    """A runtime that runs the chat program in this process; all else is the runtime's own."""

    def __init__(self, runtime: Any, trace: Any, program: dict[str, Any]) -> None:
        self._runtime = runtime
        self._trace = trace
        self._program = program

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    async def prepare_uv_script(self, *_: Any, **__: Any) -> list[str]:
        """Return no words: nothing is started."""
        return []

    async def run_program(self, argv: list[str], _: dict[str, str]) -> Any:
        """Run the program with these words; its directory is the runtime's."""
        from openai import APIStatusError
        from verifiers.v1.runtimes import ProgramResult

        written = "--initial-messages-file="
        place = f"{written}{self._runtime.workdir}/"
        words = [place + word.removeprefix(written) if word.startswith(written) else word for word in argv]
        try:
            settings = _read(self._program["read"], words)
            self._program["parse_args"] = lambda: settings  # asked for before the program waits for the first time
            await self._program["main"]()
        except asyncio.CancelledError:
            raise
        except APIStatusError as error:
            if SPENT not in str(error):
                return ProgramResult(exit_code=1, stdout="", stderr=traceback.format_exc())
            self._trace.stop("max_turns")  # as verifiers' own limit: what was said is scored
        except SystemExit as end:
            return ProgramResult(exit_code=int(end.code or 0), stdout="", stderr=traceback.format_exc())
        except Exception:  # noqa: BLE001 - the program has failed; its rollout goes on with that
            return ProgramResult(exit_code=1, stdout="", stderr=traceback.format_exc())
        return ProgramResult(exit_code=0, stdout="", stderr="")
