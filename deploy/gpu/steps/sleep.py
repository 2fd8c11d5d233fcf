"""An engine gives the device back, wakes, and takes a version: its weights are what was written, before and after."""

from __future__ import annotations

import tempfile
from pathlib import Path

from ....fabric.contract.errors import EngineUnsupported
from ...cli.exits import run_async
from .engines import answer, check, engine, some
from .models import change, layout_of, random_bits, save, write_model
from .telling import Asked, asked, skip, tell


def main() -> None:
    told, _ = asked()
    with tempfile.TemporaryDirectory(prefix="rollfab-kit-") as directory:
        run_async(_run(told, Path(directory)))


async def _run(told: Asked, directory: Path) -> None:
    name = "tiny" if told.is_tiny else "1.5B"
    layout = layout_of(write_model(directory, name))
    bits = random_bits(layout, 0)
    save(directory, layout, bits)
    async with engine(directory, name, **({"enable_sleep_mode": True} if told.is_gpu else {})) as made:
        await answer(made, "before")
        try:
            sleep_s = await made.sleep()
        except EngineUnsupported as error:
            skip(str(error))
        wake_s = await made.wake()
        await check(made, bits)
        old = {each: values.copy() for each, values in bits.items()}
        change(bits, 0.01, seed=1)
        pause_s = await made.apply(some(1, old, bits))
        await check(made, bits)
        await answer(made, "after")
    tell(sleep_s=sleep_s, wake_s=wake_s, pause_s=pause_s)


if __name__ == "__main__":
    main()
