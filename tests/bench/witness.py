"""A rollout worker that leaves a record of what its engine did, which survives the kill of its process.

- The worker is the one of every day: the same loop, the same engine, the same broker. A thread beside it looks at the
  engine and writes what it sees into files, through the page cache, so that SIGKILL loses nothing of it.
- `<pid>.tokens`: how many tokens the engine has made, at most LOOK_S old. It is written as one machine word, since
  another process reads it at any time: byte by byte, a reader would now and then find 0, and take all tokens so far for
  new ones.
- `<pid>.resumed`: a line for every turn that came with tokens of an earlier claim: its id, how many tokens it had, when
  the engine was asked for it and when its first new token was there, by the machine's monotonic clock. Turns without
  such tokens are watched too, with a count of 0.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import threading
import time
from pathlib import Path
from typing import Any

import orjson

from rollfab.deploy.roles.engines import EngineOptions
from rollfab.deploy.roles.options import WorkerOptions
from rollfab.deploy.roles.run import run_worker
from rollfab.workers.engines.base import GenerationRequest
from rollfab.workers.engines.transformers.engine import TransformersConfig, TransformersEngine
from rollfab.workers.serving.options import ServingOptions

LOOK_S = 0.002
COUNT_BYTES = 8
POOL = "bench"  # of serving workers, by which they are lent whenever they start


def run_witness(url: str, name: str | None, *, role: str, slot_count: int, directory: Path) -> None:
    """Generate turns under a lease until told to stop, with the tiny preset; the record goes to `directory`."""
    options = WorkerOptions(
        url=url,
        name=name,
        role=role,
        engine=EngineOptions(model="tiny", slot_count=slot_count),
        serving=ServingOptions(pool=POOL if role == "serving" else ""),
    )
    run_worker(options, make_engine=lambda engine, _: WitnessedEngine(engine.for_transformers(), directory))


class WitnessedEngine(TransformersEngine):
    """The engine, watched by a thread from its start to its end."""

    def __init__(self, config: TransformersConfig, directory: Path) -> None:
        super().__init__(config)
        self._directory = directory
        self._asked: dict[str, tuple[int, int]] = {}  # request → tokens it came with, when it was asked for
        self._is_closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="witness", daemon=True)

    async def start(self) -> None:
        await super().start()
        self._watcher.start()

    async def close(self) -> None:
        self._is_closing.set()
        if self._watcher.is_alive():
            await asyncio.to_thread(self._watcher.join)
        await super().close()

    def generate(self, request: GenerationRequest) -> None:
        asked_ns = time.monotonic_ns()
        super().generate(request)
        # Now that the engine knows it: the watcher takes what it does not know for ended, and writes no line of it.
        self._asked[request.request_id] = (len(request.prior_ids), asked_ns)

    def _watch(self) -> None:
        with (
            SharedCount(self._directory / f"{os.getpid()}.tokens") as count,
            (self._directory / f"{os.getpid()}.resumed").open("ab", buffering=0) as lines,
        ):
            while not self._is_closing.wait(LOOK_S):
                count.set(self.stats().token_count)
                for line in self._first_tokens():
                    lines.write(orjson.dumps(line) + b"\n")
            count.set(self.stats().token_count)

    def _first_tokens(self) -> list[dict[str, Any]]:
        found = []
        for name, (prior_count, asked_ns) in list(self._asked.items()):
            made = self.progress([name])
            if made and len(made[0].completion_ids):
                at = {"asked_ns": asked_ns, "first_ns": time.monotonic_ns()}
                turn = name.partition("#")[0]  # behind it the worker says which claim of the turn it was
                found.append({"turn": turn, "prior_count": prior_count, **at})
            elif made or name in self._open_ids:
                continue
            self._asked.pop(name, None)
        return found


class SharedCount:
    """A number that one process writes, while others read it from the file with `read_count`."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(COUNT_BYTES))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), COUNT_BYTES)
        self._word = memoryview(self._map).cast("q")

    def set(self, value: int) -> None:
        """Replace the number, in one store."""
        self._word[0] = value

    def __enter__(self) -> SharedCount:
        return self

    def __exit__(self, *_: object) -> None:
        self._word.release()
        self._map.close()


def read_count(path: Path) -> int:
    """The number in a SharedCount's file, read in one load; 0 while the file is being made."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size < COUNT_BYTES:
            return 0
        with (
            mmap.mmap(file.fileno(), COUNT_BYTES, prot=mmap.PROT_READ) as found,
            memoryview(found) as view,
            view.cast("q") as word,
        ):
            return word[0]


def token_count(directory: Path) -> int:
    """Tokens that all engines that ever ran with this directory have made."""
    return sum(map(read_count, directory.glob("*.tokens")))


def first_tokens(directory: Path) -> list[dict[str, Any]]:
    """All lines of all workers, with the pid they are of."""
    found = []
    for path in directory.glob("*.resumed"):
        pid = int(path.name.removesuffix(".resumed"))
        found += [{**orjson.loads(line), "pid": pid} for line in path.read_bytes().split(b"\n")[:-1]]
    return found
