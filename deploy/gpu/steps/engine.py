"""A tiny engine of vLLM: it starts, answers, takes a version in place, and answers as a fresh one that loads it."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from ...cli.exits import run_async
from .engines import answer, check, engine, some
from .models import change, layout_of, random_bits, save, write_model
from .telling import Asked, asked, tell

LIVELY = 0.25  # of the values: every token hangs on all of them


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--graphs", action="store_true")
    told, options = asked(parser)
    with tempfile.TemporaryDirectory(prefix="rollfab-kit-") as directory:
        run_async(_run(told, Path(directory), is_eager=not options.graphs))


async def _run(told: Asked, directory: Path, *, is_eager: bool) -> None:
    layout = layout_of(write_model(directory, "tiny"))
    bits = random_bits(layout, 0, LIVELY)
    save(directory, layout, bits)
    arguments = {"enforce_eager": True} if is_eager or not told.is_gpu else {}
    began_s = time.monotonic()
    async with engine(directory, "tiny", **arguments) as made:
        start_s = time.monotonic() - began_s
        first = await answer(made, "first")
        old = {name: values.copy() for name, values in bits.items()}
        for values in bits.values():
            values[: len(values) // 2] = values[: len(values) // 2][::-1].copy()
        change(bits, 0.1, seed=1)
        pause_s = await made.apply(some(1, old, bits))
        await check(made, bits)
        second = await answer(made, "second")
    save(directory, layout, bits)
    async with engine(directory, "tiny", **arguments) as fresh:
        await check(fresh, bits)
        loaded = await answer(fresh, "loaded")
    assert second.completion_ids.tolist() != first.completion_ids.tolist(), "new weights changed no token"
    assert second.completion_ids.tolist() == loaded.completion_ids.tolist(), "a fresh engine answers otherwise"
    tell(start_s=start_s, pause_s=pause_s, is_eager=bool(arguments), tokens=len(second.completion_ids))


if __name__ == "__main__":
    main()
