"""`rollfab bench …`: each bench is a module of the bench room."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True)

Quick = Annotated[bool, typer.Option("--quick", help="A rougher figure in under a minute.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command("queue")
def queue(quick: Quick = False, json: AsJson = False, url: Annotated[str | None, typer.Option()] = None) -> None:
    """Jobs per second and push-to-claim latency, beside other queues and the broker's own limit."""
    from ..bench.queue import bench_queue

    raise typer.Exit(bench_queue(quick=quick, json_output=json, url=url))


@app.command("overhead")
def overhead(quick: Quick = False, json: AsJson = False) -> None:
    """Tokens per second through the whole fabric, over the same engine fed directly."""
    from ..bench.overhead import bench_overhead

    raise typer.Exit(bench_overhead(quick=quick, json_output=json))
