"""Writes versions into an engine that generates: pauses, gaps between steps, and in the end a fresh load's weights.

- Versions are made by the publisher's snapshot, staged from their chunks and applied, as a worker does it; only the
  broker between is left out.
- Gaps are those between two steps, in which each request in flight gets a token; those that lie in the staging or in
  the commit of a version are told apart from all others.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ....fabric.format.layout import Layout
from ....fabric.versions.commit import Staged
from ....fabric.versions.rank_parts import whole as whole_part
from ....fabric.versions.snapshot import Identity, Prepared, Snapshot
from ....fabric.versions.stage import Stage
from ....workers.engines.vllm.engine import VllmEngine
from ...cli.exits import run_async
from ...replay.figures import percentile
from .engines import Bits, check, engine, request, whole
from .models import change, layout_of, random_bits, save, write_model
from .telling import Asked, asked, tell

FRACTION = 0.01
LOOK_S = 0.0005
REST_S = 0.3  # between two versions: gaps that belong to none


class Steps:
    """The times at which the engine made a step, found by looking often on this process' loop, else left free."""

    def __init__(self, made: VllmEngine) -> None:
        self._made = made
        self.at_s: list[float] = []

    async def watch(self) -> None:
        count = self._made.stats().step_count
        while True:
            await asyncio.sleep(LOOK_S)
            now = self._made.stats().step_count
            if now != count:
                count = now
                self.at_s.append(time.monotonic())

    def gaps_ms(self, windows: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
        """Return the gaps that touch a window, and all others."""
        inside: list[float] = []
        outside: list[float] = []
        for before, after in zip(self.at_s, self.at_s[1:], strict=False):
            is_inside = any(first < after and before < last for first, last in windows)
            (inside if is_inside else outside).append(1000 * (after - before))
        return inside, outside


def main() -> None:
    told, _ = asked()
    with tempfile.TemporaryDirectory(prefix="rollfab-kit-") as directory:
        run_async(_run(told, Path(directory)))


async def _run(told: Asked, directory: Path) -> None:
    name = "tiny" if told.is_tiny else "7B"
    slot_count, context_tokens, version_count = (4, 256, 3) if told.is_tiny else (64, 2048, 20)
    layout = layout_of(write_model(directory, name))
    bits = random_bits(layout, 0)
    save(directory, layout, bits)
    sizes = {"slot_count": slot_count, "context_tokens": context_tokens}
    async with engine(directory, name, **sizes) as made:
        keyframe_s = await made.apply(whole(0, bits))
        tell(parameters=layout.element_count, keyframe_pause_s=keyframe_s)
        load = asyncio.create_task(_load(made, slot_count, context_tokens - 64))
        steps = Steps(made)
        watch = asyncio.create_task(steps.watch())
        figures = await _versions(made, layout, bits, version_count, steps)
        for task in (watch, load):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await check(made, bits)
    tell(**figures)
    save(directory, layout, bits)
    async with engine(directory, name, **sizes) as fresh:
        await check(fresh, bits)
    tell(same_as_a_fresh_load=True)


async def _load(made: VllmEngine, count: int, max_tokens: int) -> None:
    """Keep so many requests in flight, each of another length."""
    number = 0
    while True:
        stats = made.stats()
        for _ in range(count - stats.running_count - stats.waiting_count):
            made.generate(request(f"load-{number}", max_tokens - (7 * number) % (max_tokens // 2), temperature=1.0))
            number += 1
        for ended in await made.finished(0.01):
            assert ended.error is None, ended.error


async def _versions(made: VllmEngine, layout: Layout, bits: Bits, version_count: int, steps: Steps) -> dict[str, Any]:
    snapshot = await asyncio.to_thread(Snapshot, layout, bits, 0)
    staging: list[tuple[float, float]] = []
    commits: list[tuple[float, float]] = []
    pauses_ms: list[float] = []
    for version in range(1, version_count + 1):
        await asyncio.sleep(REST_S)
        await asyncio.to_thread(change, bits, FRACTION, version)
        prepared = await asyncio.to_thread(
            snapshot.prepare_delta, Identity(run_id="kit", epoch=1, version=version), bits
        )
        await asyncio.to_thread(snapshot.advance, prepared)
        began_s = time.monotonic()
        staged = await asyncio.to_thread(_staged, layout, made.weight_bits(), prepared)
        between_s = time.monotonic()
        pauses_ms.append(1000 * await made.apply(staged))
        staging.append((began_s, between_s))
        commits.append((between_s, time.monotonic()))
    await asyncio.sleep(REST_S)
    _, quiet = steps.gaps_ms(staging + commits)
    assert quiet, "the engine made no step between two versions"
    found: dict[str, Any] = {"changed": staged.changed_count, "pause_ms": _spread(pauses_ms), "gap_ms": _spread(quiet)}
    for what, windows in (("staging", staging), ("commit", commits)):
        inside, _ = steps.gaps_ms(windows)
        found[f"{what}_s"] = _spread([last - first for first, last in windows])
        found[f"gap_ms_around_{what}"] = _spread(inside)
    return found


def _staged(layout: Layout, live: Bits, prepared: Prepared) -> Staged:
    manifest = prepared.manifest
    stage = Stage(whole_part(layout), live, manifest.base_version)
    stage.begin(manifest)
    for chunk in prepared.chunks:
        stage.feed(chunk)
    stage.end()
    return stage.finish()


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    """Return P50, P99 and the most; None: there are no values."""
    if not values:
        return None
    return {"p50": percentile(values, 0.5), "p99": percentile(values, 0.99), "max": max(values)}


if __name__ == "__main__":
    main()
