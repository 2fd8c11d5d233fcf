"""A rollout engine is killed (SIGKILL) while it steps beside a serving engine: every request must be answered, those
that run then and those that come later.
"""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.bench.alone import alone
from tests.bench.coserve.arms import Load, Rounds
from tests.bench.coserve.cast import BORROWED, Pair, Sizes
from tests.bench.coserve.load import traffic
from tests.bench.coserve.main import ANY
from tests.bench.coserve.places import engine_pid
from tests.bench.coserve.switch import Switch

from ...replay.figures import percentile
from .pairs import pair_sizes
from .telling import Asked, tell

REPLAY_S = 300.0
LEAD_S = 0.3


def main() -> None:
    with pair_sizes() as (told, sizes):
        switch = Switch.create(Path("/dev/shm") / f"rollfab-kit-{os.getpid()}-switch")
        try:
            with alone("coserve"), Pair(sizes, switch.path) as pair:
                _kill(told, sizes, pair, switch)
        finally:
            switch.path.unlink(missing_ok=True)


def _kill(told: Asked, sizes: Sizes, pair: Pair, switch: Switch) -> None:
    rate_per_s, count = (6.0, 24) if told.is_tiny else (8.0, 160)
    rounds = Rounds(pair, Load(rate_per_s=rate_per_s, request_count=count), switch)
    rounds.warm()
    rounds.borrow(ANY)
    rounds.enter("share-all")
    arrivals = [
        traffic(seed, rate_per_s=rate_per_s, count=count, context_tokens=sizes.context_tokens) for seed in (1, 2)
    ]
    with ThreadPoolExecutor(1) as aside:
        start_at_s = time.monotonic() + LEAD_S
        replaying = aside.submit(pair.client.call, "replay", arrivals[0], start_at_s, timeout_s=REPLAY_S)
        time.sleep(LEAD_S + arrivals[0][count // 3].at_s)  # noqa: TID251  real time: in the middle of the replay
        pair.until_it_steps(REPLAY_S)
        killed_at_s = time.monotonic()
        os.kill(engine_pid(pair.pid(BORROWED)), signal.SIGKILL)
        outcomes = list(replaying.result())
    meanwhile = sum(start_at_s + each.arrival.at_s > killed_at_s for each in outcomes)
    outcomes += pair.client.call("replay", arrivals[1], time.monotonic() + LEAD_S, timeout_s=REPLAY_S)
    pair.serving.check()
    ttft_ms = [1000 * each.ttft_s for each in outcomes if each.ttft_s is not None]
    failures = [f"{each.error}: {each.detail}" for each in outcomes if each.error]
    after = meanwhile + len(arrivals[1])
    tell(requests=len(outcomes), after_the_kill=after, failures=failures[:5], ttft_ms_p99=percentile(ttft_ms, 0.99))
    assert not failures, f"{len(failures)} requests failed when the rollout engine was killed"


if __name__ == "__main__":
    main()
