"""Which groups take long: their task's trajectories did so before. They go first, so that no step ends with them.

- A trajectory's length is the work it makes: tokens of the policy, and its environment's seconds as the tokens that are
  made meanwhile. Time in queues is no part of it: what goes first waits less, and would soon look short.
- A task is known by TASK_NAMES names, so what is kept has a bound; two that share a name share their mean. The newest
  trajectories count most: with TASK_COUNT, or RUN_COUNT of the run, half of them are forgotten.
- A group is long if its task's mean is LONG times the run's, which that of at most 1 / LONG of the trajectories can be.
  A finer order does no better where tasks are known well, and worse where they are not: docs/decisions/0071.
- What a trajectory has made so far tells nothing more: all that are under way get there at the same time.
- Trajectories that were cancelled, by a quorum or a deadline, are not counted: nobody knows how long they would have
  been.

queue/lua/use/length.lua carries it out, and use/ring.lua bounds the waiting; the other bounds are here and there.
"""

from __future__ import annotations

from zlib import crc32

from ...contract.records import Rollout, RunConfig

LONG = 1.5
KNOWN_COUNT = 16  # trajectories of the run, before which nothing is known
TASK_COUNT = 16
RUN_COUNT = 1024
TASK_NAMES = 1 << 16
TOKENS_PER_S = 50  # made by one slot while an environment takes a second: 20 ms a token
LENGTH_MAX = 10**9


def task_name(run: RunConfig, task_id: str) -> str:
    """Return what the broker calls a task, four hexadecimal digits; "": the run keeps no lengths."""
    return f"{crc32(task_id.encode()) % TASK_NAMES:04x}" if run.longest_first else ""


def length_of(rollout: Rollout) -> int:
    """Return the length of a trajectory, in tokens, 0 to LENGTH_MAX."""
    answered, over = rollout.turn_ms[1::3], rollout.turn_ms[2::3]
    environment_ms = sum(max(0, end - begin) for begin, end in zip(answered, over, strict=False))
    made = int(rollout.completion_mask.sum())
    return min(made + environment_ms * TOKENS_PER_S // 1000, LENGTH_MAX)
