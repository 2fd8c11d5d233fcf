"""Lives of a trainer, each ended by SIGKILL, until one comes to its end: `python killed_trainer.py SEED DIRECTORY`.

The trainer is docs/examples/checkpointed.py. A life ends just before some line of it, counted from its first; some end
earlier, after some time, wherever they are then. It prints one line per life: where it ended.

Each is a fork of this process, which has imported everything and connected to nothing: a life takes a tenth of a
second.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from docs.examples import checkpointed

WHERE = {"main", "publish", "save"}  # whose lines count: what is lost with a kill elsewhere was never anywhere
LINE_COUNT_MAX = 50  # of a life: one that gets as far makes some steps
LIFE_S_MAX = 0.4
BY_TIME = 0.2  # share of lives


def kill_at_line(count: int) -> Any:
    """A trace function that kills this process before the line of that number."""
    left = count

    def on_line(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if event == "line":
            left -= 1
            if left == 0:
                print(f"killed before {frame.f_code.co_name}:{frame.f_lineno}", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
        return on_line

    def on_call(frame: FrameType, *_: Any) -> Any:
        return on_line if frame.f_code.co_filename == checkpointed.__file__ and frame.f_code.co_name in WHERE else None

    return on_call


def live(directory: Path, line_count: int, life_s: float | None) -> bool:
    """One life; whether it came to its end. life_s: where it ends earlier if it has not come to its line."""
    child = os.fork()
    if child == 0:
        sys.settrace(kill_at_line(line_count))
        checkpointed.main(directory)
        os._exit(0)
    if life_s is not None:
        time.sleep(life_s)
        os.kill(child, signal.SIGKILL)
        print(f"over after {life_s:.2f} s", flush=True)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the trainer failed"
    return os.WIFEXITED(status)


def main(seed: int, directory: Path) -> None:
    sys.modules["numba"] = None  # type: ignore[assignment]  # every life would load it, which takes longer than a life
    random = Random(seed)
    for life in itertools.count(1):
        life_s = random.uniform(0.0, LIFE_S_MAX) if random.random() < BY_TIME else None
        if live(directory, random.randint(1, LINE_COUNT_MAX), life_s):
            print(f"done in life {life}", flush=True)
            return


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
