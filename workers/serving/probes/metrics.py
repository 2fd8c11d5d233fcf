"""Reads what vLLM's /metrics say of a serving engine out of their text, and follows it from scrape to scrape.

Fit for dashboards, barely for control. This cannot be seen, and is assumed instead:

- Gauges and counters are of the last step that was recorded. While the server is paused, or in a long step, they freeze
  and look like those of an engine that rests.
- When a request arrived: it counts from the scrape before the one that first showed it, so it looks older than it is.
- Which request is which: the oldest are taken to get their first token, and to end, first.
- How far one has come: tokens are counted for all together, and each is given an equal share, rounded down; its first
  token counts from the scrape before the one that first showed it. A request looks slower than it is.
- Prompts of those that wait: the 95th percentile of prompts that ended, UNKNOWN_PROMPT_TOKENS before enough have. What
  is in the prefix cache counts as if it were not.
- Latencies of those that ended: the upper bound of the histogram's bucket.
- Whether a step is under way: taken to be, whenever something runs.

No clock and no IO here.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, inf

from ....fabric.rules.serving.facts import RunningRequest, ServingState, StepSample, StepWork, WaitingRequest

PREFIX = b"vllm:"
SUMS = {
    b"num_requests_running",
    b"num_requests_waiting",
    b"kv_cache_usage_perc",
    b"prompt_tokens_total",
    b"generation_tokens_total",
    b"request_success_total",
    b"inter_token_latency_seconds_sum",
    b"inter_token_latency_seconds_count",
    b"iteration_tokens_total_count",
}
HISTOGRAMS = {
    b"time_to_first_token_seconds_bucket",
    b"request_time_per_output_token_seconds_bucket",
    b"request_prompt_tokens_bucket",
}
INFO = b"cache_config_info"
COUNTERS = ("generation_tokens_total", "prompt_tokens_total", "request_success_total")
UNKNOWN_PROMPT_TOKENS = 2048  # one chunk of a prompt, as vLLM reads them by default
PROMPT_QUANTILE = 0.95
PROMPTS_MIN = 20  # ended, before the percentile is believed
Histogram = dict[float, float]  # upper bound → count at or below it


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """One scrape, summed over engines and labels. Names are vLLM's, without their prefix."""

    values: Mapping[str, float]
    histograms: Mapping[str, Histogram]
    kv_capacity_tokens: int = 0

    def value(self, name: str) -> float:
        """Return the metric's value; 0 if it was not in the scrape."""
        return self.values.get(name, 0.0)


def parse(text: bytes) -> Metrics | None:
    """Read the lines that are needed out of Prometheus' text format; None: they are not vLLM's."""
    values: dict[str, float] = {}
    histograms: dict[str, Histogram] = {}
    capacity = 0
    for line in text.splitlines():
        if not line.startswith(PREFIX):
            continue
        head, _, rest = line[len(PREFIX) :].partition(b"{")
        if head in SUMS:
            values[head.decode()] = values.get(head.decode(), 0.0) + float(line.rpartition(b" ")[2])
        elif head in HISTOGRAMS:
            bound = _label(rest, b"le")
            if bound is not None:
                counts = histograms.setdefault(head.decode().removesuffix("_bucket"), {})
                counts[float(bound)] = counts.get(float(bound), 0.0) + float(line.rpartition(b" ")[2])
        elif head == INFO:
            capacity += int(_label(rest, b"num_gpu_blocks") or 0) * int(_label(rest, b"block_size") or 0)
    is_vllm = "num_requests_running" in values and "num_requests_waiting" in values
    return Metrics(values=values, histograms=histograms, kv_capacity_tokens=capacity) if is_vllm else None


def _label(labels: bytes, name: bytes) -> bytes | None:
    found = re.search(rb'(?:^|,)%s="([^"]*)"' % name, labels)
    return found[1] if found and found[1] != b"None" else None


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that ended. token_count: the mean of all that ever did, at least 2."""

    ttft_s: float
    tpot_s: float
    token_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The news of one scrape. arrivals: prompt tokens of each request that came."""

    state: ServingState
    step: StepSample | None
    arrivals: tuple[int, ...]
    ends: tuple[Ended, ...]


@dataclass(slots=True)
class _Cohort:
    """A request that makes tokens, as far as that is known. token_count: its share, with its fraction."""

    first_token_at_s: float
    token_count: float = 1.0


@dataclass(slots=True)
class ScrapeHistory:
    """Follows a server from one scrape to the next."""

    _last: Metrics | None = None
    _last_at_s: float = 0.0
    _waiting_since_s: deque[float] = field(default_factory=deque)
    _running: deque[_Cohort] = field(default_factory=deque)
    _ttfts_s: deque[float] = field(default_factory=lambda: deque(maxlen=4096))  # of requests that have not ended

    def take(self, metrics: Metrics, at_s: float) -> Seen:
        """Return the serving state, and what is new, at a scrape that was begun at `at_s`.

        A counter that fell is that of another server: everything begins anew.
        """
        last = self._last
        if last is None or any(_grown(last, metrics, name) < 0 for name in COUNTERS):
            for known in (self._waiting_since_s, self._running, self._ttfts_s):
                known.clear()
            last, self._last_at_s = metrics, at_s
        first_token_count = _increase(last, metrics, "time_to_first_token_seconds")
        arrivals = self._follow_waiting(metrics, sum(first_token_count.values()), is_first=last is metrics)
        self._follow_running(metrics, last)
        self._ttfts_s.extend(_each(first_token_count))
        tpots_s = _each(_increase(last, metrics, "request_time_per_output_token_seconds"))
        tokens = max(
            2, round(metrics.value("generation_tokens_total") / max(1.0, metrics.value("request_success_total")))
        )
        ends = tuple(Ended(self._ttfts_s.popleft(), tpot_s, tokens) for tpot_s in tpots_s if self._ttfts_s)
        self._last, before_s, self._last_at_s = metrics, self._last_at_s, at_s
        return Seen(
            state=self._state(metrics, at_s, before_s),
            step=_step(last, metrics),
            arrivals=(_prompt_tokens(metrics),) * arrivals,
            ends=ends,
        )

    def _follow_waiting(self, metrics: Metrics, first_token_count: float, *, is_first: bool) -> int:
        """Follow the requests that wait; returns how many came."""
        waiting_count, before_count = round(metrics.value("num_requests_waiting")), len(self._waiting_since_s)
        for _ in range(min(round(first_token_count), before_count)):
            self._waiting_since_s.popleft()
        while len(self._waiting_since_s) > waiting_count:
            self._waiting_since_s.popleft()
        while len(self._waiting_since_s) < waiting_count:
            self._waiting_since_s.append(self._last_at_s)
        return 0 if is_first else max(0, round(first_token_count) + waiting_count - before_count)

    def _follow_running(self, metrics: Metrics, last: Metrics) -> None:
        running_count = round(metrics.value("num_requests_running"))
        ended_count = round(_grown(last, metrics, "request_success_total"))
        made = _grown(last, metrics, "generation_tokens_total")
        sharing_count = max(len(self._running), running_count, 1)
        for each in self._running:
            each.token_count += made / sharing_count
        for _ in range(min(ended_count, len(self._running))):
            self._running.popleft()
        while len(self._running) > running_count:
            self._running.popleft()
        while len(self._running) < running_count:
            self._running.append(_Cohort(self._last_at_s))

    def _state(self, metrics: Metrics, at_s: float, before_s: float) -> ServingState:
        used_tokens = ceil(metrics.value("kv_cache_usage_perc") * metrics.kv_capacity_tokens)
        count = len(self._running)
        prompt_tokens, context_tokens = _prompt_tokens(metrics), used_tokens // max(1, count)
        work = StepWork(
            prefill_tokens=prompt_tokens if self._waiting_since_s else 0, decode_count=count, context_tokens=used_tokens
        )
        return ServingState(
            seen_at_s=at_s,
            waiting=tuple(
                WaitingRequest(arrived_at_s=since_s, prefill_tokens=prompt_tokens) for since_s in self._waiting_since_s
            ),
            running=tuple(
                RunningRequest(
                    first_token_at_s=each.first_token_at_s,
                    token_count=int(each.token_count),
                    context_tokens=context_tokens,
                )
                for each in self._running
            ),
            step=work if count or self._waiting_since_s else None,
            step_began_at_s=before_s,
            kv_used_tokens=used_tokens,
            kv_capacity_tokens=metrics.kv_capacity_tokens,
        )


def _grown(last: Metrics, now: Metrics, name: str) -> float:
    return now.value(name) - last.value(name)


def _increase(last: Metrics, now: Metrics, name: str) -> Histogram:
    """Count how many values came into each bucket, by its upper bound."""
    before, counts, below = last.histograms.get(name, {}), now.histograms.get(name, {}), 0.0
    grown: Histogram = {}
    for bound in sorted(counts):
        total = counts[bound] - before.get(bound, 0.0)
        grown[bound], below = max(0.0, total - below), total
    return grown


def _each(counts: Histogram) -> list[float]:
    """Return one value for each that was counted: its bucket's upper bound, or twice the last finite one."""
    finite = max((bound for bound in counts if bound != inf), default=0.0)
    return [2 * finite if bound == inf else bound for bound, count in counts.items() for _ in range(round(count))]


def _prompt_tokens(metrics: Metrics) -> int:
    """Guess the prompt's length of a request that nothing is known of."""
    counts = metrics.histograms.get("request_prompt_tokens", {})
    total = counts.get(inf, 0.0)
    if total < PROMPTS_MIN:
        return UNKNOWN_PROMPT_TOKENS
    bound = min(bound for bound, count in counts.items() if count >= PROMPT_QUANTILE * total)
    return UNKNOWN_PROMPT_TOKENS if bound == inf else int(bound)


def _step(last: Metrics, now: Metrics) -> StepSample | None:
    """Return the mean step between two scrapes: what a running request waited for its next token.

    None: nothing decoded.
    """
    token_count = _grown(last, now, "inter_token_latency_seconds_count")
    step_count = _grown(last, now, "iteration_tokens_total_count")
    if token_count < 1 or step_count < 1:
        return None
    duration_s = _grown(last, now, "inter_token_latency_seconds_sum") / token_count
    work = StepWork(
        prefill_tokens=round(_grown(last, now, "prompt_tokens_total") / step_count),
        decode_count=max(1, round(token_count / step_count)),
        context_tokens=ceil(now.value("kv_cache_usage_perc") * now.kv_capacity_tokens),
    )
    return StepSample(work=work, duration_s=duration_s) if duration_s > 0 else None
