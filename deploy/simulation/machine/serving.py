"""The serving engine of a simulated instance: continuous batching, and the probe by which a guard sees it.

- Decodes first, then prompts first come, first served, in chunks. Every running request makes a token in every step.
- It has no prefix cache. A prompt waits while its KV cache has no room for it and its answer; both count as used.
- The probe is perfect and without delay. Of steps that are alike it shows one.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ....fabric.rules.serving.facts import RunningRequest, ServingState, Slo, StepWork, WaitingRequest
from ....workers.serving.probes.reader import Arrival, End, Step
from ...replay.figures import percentile
from .cost import StepCost
from .events import Broken

CHUNK_TOKENS = 2048  # vLLM's usual
SEQUENCE_MAX = 256


class Request:
    """A serving request's life; nan: not yet."""

    __slots__ = ("at_s", "completion", "ended_s", "first_s", "first_step", "prefilled", "prompt")

    def __init__(self, at_s: float, prompt: int, completion: int) -> None:
        self.at_s, self.prompt, self.completion = at_s, prompt, completion
        self.prefilled = self.first_step = 0
        self.first_s = self.ended_s = math.nan


class ServingSide:
    """A serving engine between two of its steps. Implements the guard's `Probe`."""

    name = "simulated"

    def __init__(self, cost: StepCost, kv_tokens: int, chunk_tokens: int = CHUNK_TOKENS) -> None:
        self.requests: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}
        self.load = 0  # requests that are not answered yet
        self.context_tokens = 0
        self.reserved_tokens = 0
        self.kv_tokens = kv_tokens
        self.chunk_tokens = chunk_tokens
        self.token_count = 0
        self._cost = cost
        self._steps = self._begun = 0
        self._ends: list[tuple[int, int]] = []  # (step, request)
        self._chunks: list[tuple[Request, int]] = []
        self._arrivals: list[Arrival] = []
        self._samples: list[Step] = []
        self._ended: list[End] = []
        self._work = StepWork()

    @property
    def has_work(self) -> bool:
        """True if it has a step to do."""
        return bool(self.waiting or self.running)

    def take(self, now_s: float, prompt: int, completion: int, *, is_seen: bool) -> None:
        """Take a request in. is_seen: a guard will ask for it."""
        request = Request(now_s, prompt, completion)
        self.requests.append(request)
        self.waiting.append(request)
        self.load += 1
        if is_seen:
            self._arrivals.append(Arrival(now_s, prompt))

    def next_step(self) -> tuple[float, float, int]:
        """Return the next step's seconds, by how much each one after it is longer, and how many are alike."""
        running = len(self.running)
        self._chunks = []
        if self.waiting:
            work, attention = self._chunked(self.chunk_tokens - running, SEQUENCE_MAX - running)
            if self._chunks:
                self._work = work
                return self._cost.seconds(work, attention), 0.0, 1
        assert self._ends, "a request that will never fit waits alone"
        self._work = StepWork(decode_count=running, context_tokens=self.context_tokens)
        return self._cost.seconds(self._work, 0.0), running * self._cost.context_s, self._ends[0][0] - self._steps

    def _chunked(self, left: int, places: int) -> tuple[StepWork, float]:
        attention, room = 0.0, self.kv_tokens - self.reserved_tokens
        for request in self.waiting:
            need = request.prompt + request.completion
            if left <= 0 or len(self._chunks) >= places or (need > room and (self._chunks or self.running)):
                break
            room -= need
            chunk = min(left, request.prompt - request.prefilled)
            attention += chunk * (request.prefilled + chunk / 2)
            self._chunks.append((request, chunk))
            left -= chunk
        prefill = sum(chunk for _, chunk in self._chunks)
        work = StepWork(prefill_tokens=prefill, decode_count=len(self.running), context_tokens=self.context_tokens)
        return work, attention

    def did(self, count: int, step_s: float, ended_s: float, *, is_seen: bool) -> None:
        """Note that `count` steps are done, the last one of `step_s` at `ended_s`."""
        running = len(self.running)
        self._steps += count
        self.context_tokens += running * count
        self.token_count += running * count
        if is_seen:
            self._samples.append(Step(ended_s - step_s, step_s, self._work))
        while self._ends and self._ends[0][0] <= self._steps:
            step, index = heapq.heappop(self._ends)
            if step < self._steps:
                raise Broken("a serving request made more tokens than it was asked for")
            self._end(self.running.pop(index), ended_s, is_seen)
        for request, chunk in self._chunks:
            request.prefilled += chunk
            if request.prefilled >= request.prompt:
                self._begin(request, ended_s, is_seen)
        self._chunks = []

    def _begin(self, request: Request, now_s: float, is_seen: bool) -> None:
        assert self.waiting.popleft() is request
        request.first_s, request.first_step = now_s, self._steps
        self.token_count += 1
        self.context_tokens += request.prompt + 1
        self.reserved_tokens += request.prompt + request.completion
        if request.completion <= 1:
            self._end(request, now_s, is_seen)
            return
        index = self._begun = self._begun + 1
        self.running[index] = request
        heapq.heappush(self._ends, (self._steps + request.completion - 1, index))

    def _end(self, request: Request, now_s: float, is_seen: bool) -> None:
        request.ended_s = now_s
        self.load -= 1
        self.context_tokens -= request.prompt + request.completion
        self.reserved_tokens -= request.prompt + request.completion
        if is_seen:
            self._ended.append(End(request.at_s, request.first_s, now_s, request.completion))

    # ---- the probe

    def read(self, now_s: float) -> ServingState:
        """Show the engine as it is between two steps."""
        after = self._steps + 1
        running = [
            RunningRequest(
                first_token_at_s=each.first_s,
                token_count=after - each.first_step,
                context_tokens=each.prompt + after - each.first_step,
            )
            for each in self.running.values()
        ]
        return ServingState(
            seen_at_s=now_s,
            waiting=tuple(
                [
                    WaitingRequest(arrived_at_s=each.at_s, prefill_tokens=each.prompt - each.prefilled)
                    for each in self.waiting
                ]
            ),
            running=tuple(running),
            kv_used_tokens=self.reserved_tokens,
            kv_capacity_tokens=self.kv_tokens,
        )

    def new_arrivals(self) -> list[Arrival]:
        """Return what arrived since the last call."""
        found, self._arrivals = self._arrivals, []
        return found

    def new_steps(self) -> list[Step]:
        """Return steps that ended since the last call."""
        found, self._samples = self._samples, []
        return found

    def new_ends(self) -> list[End]:
        """Return requests that ended since the last call."""
        found, self._ended = self._ended, []
        return found

    def forget_news(self) -> None:
        """Show a guard that begins now nothing of what was before."""
        self._arrivals, self._samples, self._ended = [], [], []


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What serving's users saw. Attained: of all requests; those without an answer at the end attained nothing."""

    request_count: int
    ttft_attained: float
    tpot_attained: float
    attained: float
    ttft_ms_p50: float
    ttft_ms_p99: float
    tpot_ms_p50: float
    tpot_ms_p99: float
    worst_minute: float


def served(requests: Sequence[Request], slo: Slo, ended_s: float) -> Served | None:
    """Sum up requests once serving was drained; None: there was none."""
    if not requests:
        return None
    ttfts, tpots = latencies_ms(requests, ended_s)
    both = [a <= slo.ttft_ms and b <= slo.tpot_ms for a, b in zip(ttfts, tpots, strict=True)]
    minutes: dict[int, list[bool]] = {}
    for each, was in zip(requests, both, strict=True):
        minutes.setdefault(int(each.at_s / 60), []).append(was)
    return Served(
        request_count=len(requests),
        ttft_attained=sum(each <= slo.ttft_ms for each in ttfts) / len(requests),
        tpot_attained=sum(each <= slo.tpot_ms for each in tpots) / len(requests),
        attained=sum(both) / len(requests),
        ttft_ms_p50=percentile(ttfts, 0.5),
        ttft_ms_p99=percentile(ttfts, 0.99),
        tpot_ms_p50=percentile(tpots, 0.5),
        tpot_ms_p99=percentile(tpots, 0.99),
        worst_minute=min(sum(each) / len(each) for each in minutes.values()),
    )


def latencies_ms(requests: Sequence[Request], ended_s: float) -> tuple[list[float], list[float]]:
    """Return the times to first token, and per token after it, of requests that had until `ended_s`."""
    ttfts = [1000 * (ended_s - e.at_s if math.isnan(e.first_s) else e.first_s - e.at_s) for e in requests]
    return ttfts, [_tpot_ms(each) for each in requests]


def _tpot_ms(request: Request) -> float:
    """Return the mean time per token after the first; 0 where there is one token; inf: it never ended."""
    if math.isnan(request.ended_s):
        return math.inf
    later = request.completion - 1
    return 1000 * (request.ended_s - request.first_s) / later if later > 0 else 0.0
