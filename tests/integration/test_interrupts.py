"""Real processes with a real broker: signals in the middle of a publish, and children that were forked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SIGNALS = """
import random, signal, threading
import numpy as np
import rollfab

class Stopped(Exception): ...

def handler(number, frame):
    if number == signal.SIGALRM:
        raise Stopped
    signal.default_int_handler(number, frame)

signal.signal(signal.SIGALRM, handler)
signal.signal(signal.SIGINT, handler)
random.seed(1)
rng = np.random.default_rng(1)
count = wrong = version = 0

def train(weights, density):
    for array in weights.values():
        where = slice(None) if density == 1 else rng.integers(0, array.size, int(array.size * density))
        array[where] += rng.integers(1, 4, array[where].size, dtype=np.uint16)

with rollfab.connect() as fabric:
    for density in (1, 0.6, 0.01):
        run = fabric.run(f"density-{int(density * 100)}", model="any", environment="frozenlake")
        weights = {f"w{n}": rng.integers(0, 2**16, 2_000_000, dtype=np.uint16) for n in range(4)}
        run.publish(weights, 0)
        version = 0
        for round in range(10):
            version += 1
            train(weights, density)
            number = random.choice([signal.SIGALRM, signal.SIGINT])
            timer = threading.Timer(random.uniform(0.001, 0.03), signal.pthread_kill,
                                    (threading.main_thread().ident, number))
            try:
                timer.start()
                run.publish(weights, version)
                timer.join()
            except (Stopped, KeyboardInterrupt):
                count += 1
            train(weights, density)
            version += 1
            run.publish(weights, version)
            found = run.weights()
            wrong += any((found[name] != array).any() for name, array in weights.items())
print(count, wrong)
"""

FORK = """
import gc, multiprocessing, os, signal, sys
import numpy as np
import rollfab
from rollfab.errors import ConnectionForked

weights = {"w": np.arange(100_000, dtype=np.uint16)}
fabric = rollfab.connect()
run = fabric.run("forked", model="any", environment="frozenlake")
run.publish(weights, 0)
run.submit([{"seed": 1}])

def use():
    signal.alarm(20)  # a hang ends this child by a signal
    calls = (
        lambda: run.publish(weights, 1), lambda: run.weights(), lambda: run.submit([{"seed": 2}]),
        lambda: next(run.groups(timeout=1)), lambda: run.status(), lambda: fabric.runs(), lambda: run.head_version(),
        lambda: fabric.run("other", model="any", environment="frozenlake"),
    )
    for call in calls:
        try:
            call()
        except ConnectionForked as error:
            assert "forked from it" in str(error) and "open a connection here" in str(error), error
        else:
            raise AssertionError("it was not refused")
    fabric.close()
    gc.collect()

def end(code):
    assert code == 0, code
    weights["w"][:] += 1
    run.publish(weights, run.head_version() + 1)  # the parent goes on
    assert (run.weights()["w"] == weights["w"]).all()

child = os.fork()
if child == 0:
    use()
    with rollfab.connect(fabric.url) as own:  # and the child, with a connection of its own
        assert own.run("forked").head_version() == 0
    sys.exit(0)  # an ordinary end, with everything collected
end(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

process = multiprocessing.get_context("fork").Process(target=use)
process.start()
process.join()
end(process.exitcode)

fabric.close()
print("fine")
"""

FORK_AIO = """
import asyncio, os, signal, sys
import numpy as np
import rollfab
from rollfab.errors import ConnectionForked
from rollfab.fabric.bus.embedded import EmbeddedBroker

weights = {"w": np.arange(100_000, dtype=np.uint16)}

async def main(url):
    async with await rollfab.aio.connect(url) as fabric:
        run = await fabric.run("forked", model="any", environment="frozenlake")
        await run.publish(weights, version=0)
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            for call in (lambda: run.publish(weights, version=1), run.weights, run.status, run.head_version,
                         lambda: run.submit([{"seed": 2}]), fabric.runs, lambda: anext(run.groups(timeout=1))):
                try:
                    await call()
                except ConnectionForked:
                    continue
                os._exit(3)
            await fabric.close()
            os._exit(0)
        code = os.waitstatus_to_exitcode((await asyncio.to_thread(os.waitpid, child, 0))[1])
        assert code == 0, code
        weights["w"][:] += 1
        await run.publish(weights, version=1)
        assert ((await run.weights())["w"] == weights["w"]).all()

with EmbeddedBroker.start() as broker:
    asyncio.run(main(broker.url))
print("fine")
"""


def script(text: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "ROLLFAB_URL"}
    done = subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        text=True,
        env={**environment, "PYTHONPATH": str(ROOT / "src")},
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(120)
def test_signals_in_the_middle_of_a_publish_leave_no_wrong_bit() -> None:
    count, wrong = script(SIGNALS).split()

    assert int(count) >= 5
    assert int(wrong) == 0


@pytest.mark.timeout(120)
@pytest.mark.parametrize("text", [FORK, FORK_AIO], ids=["sync", "aio"])
def test_a_forked_child_is_refused_at_once_and_hurts_nobody(text: str) -> None:
    assert script(text) == "fine\n"
