"""An agent that is written against OpenAI's API alone, and a tiny model that learns to play it.

Behind one of four doors is a prize, and only a tool tells which. Start the fabric, then train (two to eight minutes):

    rollfab up --environment doors=docs.examples.doors:play
    python -m docs.examples.doors        # with the ROLLFAB_URL that `up` printed
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DOORS = "ABCD"
ENOUGH = 0.9  # mean reward of three steps; whoever always looks and opens the right door has 1
LOOK = {"type": "function", "function": {"name": "look", "description": "Says where the prize is."}}


async def play(task: dict[str, Any], client: Any) -> dict[str, Any]:
    """Open a door. Having looked is worth 0.2, the right door 0.8."""
    prize = random.Random(task["seed"]).choice(DOORS)
    messages: list[Any] = [{"role": "user", "content": "?"}]
    has_looked = False
    for _ in range(2):
        reply = await client.chat.completions.create(model="policy", messages=messages, tools=[LOOK], max_tokens=1)
        message = reply.choices[0].message
        if has_looked or not message.tool_calls:
            break
        has_looked = True
        call = message.tool_calls[0]
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": prize}]
    is_right = (message.content or "")[:1] == prize
    return {"reward": 0.2 * has_looked + 0.8 * is_right, "info": {"success": is_right, "looked": has_looked}}


def tasks(count: int, first: int) -> list[dict[str, Any]]:
    """Make the tasks `first` … of an endless series."""
    return [{"seed": index} for index in range(first, first + count)]


def train(directory: Path, *, url: str | None = None, seed: int = 0, enough: float = ENOUGH) -> list[float]:
    """Train the tiny model until it plays well, in 100 steps at most; return the mean reward of each step.

    A run may get no further than to half of it: so small a model explores by luck. Another seed is another run.
    """
    import torch

    import rollfab
    from rollfab.trainer.grpo import GrpoSettings
    from rollfab.trainer.loop import TrainingLoop

    torch.set_num_threads(1)
    settings = GrpoSettings(
        learning_rate=1e-3,
        learning_rate_end=0.5,
        betas=(0.9, 0.99),
        clip_fraction_up=0.5,
        entropy_weight=0.01,
        minibatch_size=64,
        group_count=16,
        group_size=16,
        step_count=100,  # at most: luck decides whether 35 or 80 are needed
        staleness=0,
    )
    with rollfab.connect(url) as fabric:
        run = fabric.run("doors", model="tiny", environment="doors", staleness=settings.staleness)

        def report(facts: Mapping[str, Any]) -> None:
            run.report(**facts)
            print(f"step {facts['step']:3}  reward {facts['reward_mean']:.2f}", flush=True)

        loop = TrainingLoop(run, settings, tasks, seed=seed, directory=directory, report=report)
        return loop.train(reward_enough=enough).rewards


if __name__ == "__main__":
    train(Path("doors-training"))
