"""A peer's side of the pipe: rounds on request, until its input ends. Only the standard library.

One line in, `{"job_count": n}`; one line out, `{"duration_s": …, "done_count": …}`. What a peer prints otherwise goes
to standard error.
"""

import json
import os
import sys
import time
from collections.abc import Callable

PAYLOAD_BYTES = 1024  # as 256 token ids
RESULT_BYTES = 128  # as 16 tokens with their log-probabilities


def payload() -> str:
    """What every job carries."""
    return "p" * PAYLOAD_BYTES


def result() -> str:
    """What every job returns."""
    return "r" * RESULT_BYTES


def serve(work_off: Callable[[int], int]) -> None:
    """Answer requests: `work_off(n)` pushes n jobs, works until all are acknowledged, and returns how many it did."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    print(json.dumps({"is_ready": True}), file=answers)
    for line in sys.stdin:
        start_s = time.perf_counter()
        done_count = work_off(json.loads(line)["job_count"])
        duration_s = time.perf_counter() - start_s
        print(json.dumps({"duration_s": duration_s, "done_count": done_count}), file=answers)
