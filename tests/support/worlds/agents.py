"""Agents that play by themselves, as users write them: coroutine functions, and a command."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


async def chat(task: dict[str, Any], client: Any, seed: int, words: str = "hello") -> dict[str, Any]:
    """Say something, and answer as often as the task says; the reward is how much came."""
    messages: list[Any] = [{"role": "user", "content": words}]
    made = 0
    for _ in range(int(task.get("turns", 2))):
        reply = await client.chat.completions.create(model="any", messages=messages, tools=[LOOK], max_tokens=4)
        made += reply.usage.completion_tokens
        message = reply.choices[0].message
        messages.append(message)
        calls = message.tool_calls or []
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "x"} for call in calls]
        messages += [] if calls else [{"role": "user", "content": "on"}]
    return {"reward": float(made), "info": {"seed": seed, "shown": sorted(os.environ)}}


async def side_by_side(task: dict[str, Any], client: Any) -> float:
    """Ask sub-agents at once, some for several samples."""

    async def ask(index: int) -> int:
        reply = await client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": f"part {index}"}], n=1 + index % 2, max_tokens=4
        )
        return len(reply.choices)

    return float(sum(await asyncio.gather(*map(ask, range(int(task["count"]))))))


async def told(task: dict[str, Any], base_url: str, key: str) -> dict[str, Any]:
    """Tell what an agent is given, without asking anything."""
    return {"reward": None, "info": {"base_url": base_url, "key": key, "task": task}}


async def careless(task: dict[str, Any], client: Any) -> float:
    """Ask for what there is not, and go on as if that were an answer."""
    with contextlib.suppress(Exception):
        await client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": "on"}], reasoning_effort="high"
        )
    return 0.5


async def odd(task: dict[str, Any]) -> Any:
    """Give what the task says."""
    value = task["value"]
    if value == "raise":
        raise ValueError("no such place")
    if value == "hang":
        await asyncio.sleep(1000)
    return {"nan": float("nan"), "object": object()}.get(value, value) if isinstance(value, str) else value


def plain(task: dict[str, Any], client: Any) -> float:
    """Be no agent: `async` was forgotten."""
    return 1.0


async def misspelt(tsk: dict[str, Any]) -> float:
    """Name a parameter that nobody gives."""
    return 1.0


def main() -> None:
    """As a command: answer the task without the model, in the way that it names."""
    task = json.loads(Path(os.environ["ROLLFAB_TASK"]).read_text())
    if task.get("code"):
        sys.exit(task["code"])
    (Path(os.environ["ROLLFAB_DIRECTORY"]) / "file").write_text("x")
    print("working …")
    print(json.dumps({"reward": task["reward"], "info": {"url": os.environ["OPENAI_BASE_URL"]}}))


if __name__ == "__main__":
    main()
