"""A rollout engine is killed (SIGKILL) while it steps beside a serving engine: every request must still be answered."""

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
    arrivals = traffic(1, rate_per_s=rate_per_s, count=count, context_tokens=sizes.context_tokens)
    with ThreadPoolExecutor(1) as aside:
        start_at_s = time.monotonic() + 0.3
        replaying = aside.submit(pair.client.call, "replay", arrivals, start_at_s, timeout_s=REPLAY_S)
        time.sleep(0.3 + arrivals[len(arrivals) // 3].at_s)  # noqa: TID251  real time: in the middle of the replay
        pair.until_it_steps(REPLAY_S)
        killed_at_s = time.monotonic()
        os.kill(engine_pid(pair.pid(BORROWED)), signal.SIGKILL)
        outcomes = replaying.result()
    pair.serving.check()
    ttft_ms = [1000 * each.ttft_s for each in outcomes if each.ttft_s is not None]
    failures = [f"{each.error}: {each.detail}" for each in outcomes if each.error]
    after = sum(start_at_s + each.arrival.at_s > killed_at_s for each in outcomes)
    tell(requests=len(outcomes), after_the_kill=after, failures=failures[:5], ttft_ms_p99=percentile(ttft_ms, 0.99))
    assert after, "the engine was killed after the last request"
    assert not failures, f"{len(failures)} requests failed when the rollout engine was killed"


if __name__ == "__main__":
    main()
