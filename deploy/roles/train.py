"""`rollfab train`: the reference GRPO trainer on a run, resumable after a kill."""

from __future__ import annotations

from typing import Annotated

import typer

from ..cli.options import AsJson, Url, need_url
from ..cli.printing import show, show_json


def register(app: typer.Typer) -> None:
    """Add the command of this file."""

    @app.command()
    def train(
        url: Url = None,
        run: Annotated[str, typer.Option(help="The run.")] = "train",
        environment: Annotated[str, typer.Option(help="frozenlake or guess-the-number.")] = "frozenlake",
        reward: Annotated[
            str | None, typer.Option(help="Registered reward function; default: the environment's.")
        ] = None,
        steps: Annotated[int | None, typer.Option(help="Optimizer steps; default: as tuned.", min=1)] = None,
        seed: Annotated[int, typer.Option(help="Of model and tasks.")] = 0,
        output: Annotated[str, typer.Option(help="Checkpoints and summary.json go here.")] = "rollfab-train",
        fresh: Annotated[bool, typer.Option("--fresh", help="Ignore an earlier checkpoint.")] = False,
        json: AsJson = False,
    ) -> None:
        """Train the tiny model with GRPO on an environment that is offered."""
        from ...trainer.loop import TrainOptions, run_training

        summary = run_training(
            TrainOptions(
                url=need_url(url),
                run_id=run,
                environment=environment,
                reward=reward,
                steps=steps,
                seed=seed,
                output=output,
                is_fresh=fresh,
            )
        )
        if json:
            show_json(summary)
            return
        rewards = f"mean reward {summary['reward_first']:.2f} → {summary['reward_last']:.2f}"
        show(f"{summary['steps']} steps, {summary['rollouts']} rollouts, {rewards}; see {output}/summary.json")
