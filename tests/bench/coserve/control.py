"""Two checks of what holds when the slow loop is gone: the kill switch, and the broker frozen in mid-burst.

- Kill switch: the controller is killed (SIGKILL), then the team says "off"; its latency runs from just before that is
  said to the end of the lent engine's last step. A sample counts only while the lease would have gone on.
- Frozen broker: SIGSTOP while serving is in a burst, for longer than a lease lasts. Requests that come meanwhile are
  held to the objectives, and the lent engine must have stopped when its lease ended.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rollfab.deploy.replay.figures import percentile
from rollfab.deploy.replay.records import Arrival, Outcome
from rollfab.fabric.contract.errors import FabricError
from rollfab.fabric.rules.serving.facts import Slo

from .arms import Rounds
from .cast import Pair
from .figures import latencies_ms
from .load import traffic

STEPS_BEFORE = 3
START_TIMEOUT_S = 60.0
QUIET_S = 0.5  # without a step for so long: it stands still
STILL_TIMEOUT_S = 10.0
LOOK_S = 0.002
FREEZE_S = 6.0  # three times what a lease lasts
SPAN_S = 20.0
FROZEN_SEED = 77


def kill_switch(pair: Pair, sample_count: int) -> dict[str, Any]:
    """Milliseconds from "off" to the last step, the controller being dead.

    Raises:
        FabricError: the engine did not stop, or did not start again.
    """
    samples = [_switch_off(pair) for _ in range(sample_count)]
    return {
        "sample_count": sample_count,
        "ms_p50": percentile(samples, 0.5),
        "ms_p99": percentile(samples, 0.99),
        "ms_max": max(samples),
    }


def _switch_off(pair: Pair) -> float:
    pair.lend("on")
    for _ in range(STEPS_BEFORE):
        pair.until_it_steps(START_TIMEOUT_S)
    pair.supervisor.kill("controller")
    asked_s = time.monotonic()
    pair.lend("off")
    deadline_s = asked_s + STILL_TIMEOUT_S
    while time.monotonic() - max(pair.last_step_s, asked_s) < QUIET_S:
        if time.monotonic() > deadline_s:
            raise FabricError(f"the lent engine still steps {STILL_TIMEOUT_S:.0f} s after its team has said off")
        time.sleep(LOOK_S)
    pair.restart_controller()
    return 1000 * max(0.0, pair.last_step_s - asked_s)


def frozen_broker(pair: Pair, rounds: Rounds, slo: Slo) -> dict[str, Any]:
    """What serving and the lent engine did while nobody could reach the broker.

    Raises:
        FabricError: the lent engine had not begun, or nobody came back.
    """
    rounds.enter("ours")
    load = rounds.load
    arrivals = traffic(
        FROZEN_SEED,
        rate_per_s=load.rate_per_s,
        count=round(SPAN_S * load.rate_per_s),
        context_tokens=pair.sizes.context_tokens,
    )
    start_at_s = time.monotonic() + 0.3
    with ThreadPoolExecutor(1) as aside:
        replaying = aside.submit(pair.client.call, "replay", arrivals, start_at_s, timeout_s=SPAN_S + 60)
        time.sleep(max(0.0, start_at_s + busiest_s(arrivals) - time.monotonic()))
        frozen_s = time.monotonic()
        os.kill(pair.broker.pid, signal.SIGSTOP)
        try:
            time.sleep(FREEZE_S)
            last_step_s, looked_s = pair.last_step_s, time.monotonic()
        finally:
            os.kill(pair.broker.pid, signal.SIGCONT)
        outcomes: list[Outcome] = replaying.result()
    meanwhile = [each for each in outcomes if 0 <= start_at_s + each.arrival.at_s - frozen_s < FREEZE_S]
    latencies = latencies_ms(meanwhile)
    pair.until_it_steps(START_TIMEOUT_S)
    return {
        "frozen_s": FREEZE_S,
        "requests": len(meanwhile),
        "ttft_ms_p99": percentile(latencies["ttft_ms"], 0.99),
        "tpot_ms_p99": percentile(latencies["tpot_ms"], 0.99),
        "is_within": percentile(latencies["ttft_ms"], 0.99) <= slo.ttft_ms
        and percentile(latencies["tpot_ms"], 0.99) <= slo.tpot_ms,
        "lease_ended_after_s": max(0.0, last_step_s - frozen_s),
        "has_ended": looked_s - last_step_s > QUIET_S,
    }


def busiest_s(arrivals: Sequence[Arrival]) -> float:
    """When the busiest second begins."""
    counts = Counter(int(each.at_s) for each in arrivals)
    return float(max(counts, key=lambda second: counts[second]))
