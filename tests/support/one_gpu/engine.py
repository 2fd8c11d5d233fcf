"""A serving engine and a rollout engine on one simulated GPU: what their steps compute, and how long these take.

- Step times are a closed form fitted to measured operator tables, plus what a CPU adds per step and request; times of
  measured vLLM servers are within 3 % of it (Qwen3-32B, TPOT). Prompts are optimistic; nothing was run on a GPU here.
- Serving: decodes first, then prompts first come, first served, in chunks. Neither engine runs out of KV cache.
- Rollouts: always as many sequences as fit, at one context; turns that end bring prompt tokens of observations.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

from rollfab.deploy.replay.records import Arrival
from rollfab.deploy.simulation.machine.cost import StepCost, model_of
from rollfab.fabric.rules.serving.facts import RunningRequest, ServingState, StepWork, WaitingRequest

SERVING_7B = model_of("Qwen2.5-7B", "h100", 1).cost
ROLLOUT_8B = model_of("Qwen3-8B", "h100", 1).cost


@dataclass(slots=True)
class Served:
    """A serving request's life; times are of the trace."""

    arrival: Arrival
    prefilled: int = 0
    started_step: int = 0  # the engine's step that made its first token
    first_at_s: float = math.nan
    ended_at_s: float = math.nan

    @property
    def ttft_s(self) -> float:
        return self.first_at_s - self.arrival.at_s

    @property
    def tpot_s(self) -> float | None:
        """None: it had one token."""
        later = self.arrival.completion_tokens - 1
        return (self.ended_at_s - self.first_at_s) / later if later > 0 else None


@dataclass
class ServingEngine:
    """Continuous batching with chunked prompts, step by step. Running sequences all make a token in every step."""

    arrivals: Sequence[Arrival]
    cost: StepCost
    chunk_tokens: int
    sequence_max: int = 256
    kv_capacity_tokens: int = 400_000  # 23 GB: what its memory holds beside the rollouts' 8B model
    served: list[Served] = field(default_factory=list)
    waiting: deque[Served] = field(default_factory=deque)
    running: dict[int, Served] = field(default_factory=dict)
    step_count: int = 0
    context_tokens: int = 0  # of the running
    _arrived: int = 0
    _ends: list[tuple[int, int]] = field(default_factory=list)  # (step, index): a heap
    _chunks: list[tuple[Served, int]] = field(default_factory=list)  # of the step under way
    _state: ServingState | None = None

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def next_arrival_s(self) -> float:
        return self.arrivals[self._arrived].at_s if self._arrived < len(self.arrivals) else math.inf

    def take_in(self, now_s: float) -> list[Arrival]:
        """Requests that have come by now."""
        begin = self._arrived
        while self.next_arrival_s <= now_s:
            request = Served(self.arrivals[self._arrived])
            self.served.append(request)
            self.waiting.append(request)
            self._arrived += 1
            self._state = None
        return list(self.arrivals[begin : self._arrived])

    def begin_step(self) -> tuple[StepWork, float]:
        """The next step's work and its time, without noise."""
        assert self.has_work
        left = self.chunk_tokens - len(self.running)
        room = self.sequence_max - len(self.running)
        attention, context = 0.0, self.context_tokens
        self._chunks = []
        for request in self.waiting:
            if left <= 0 or len(self._chunks) >= room:
                break
            chunk = min(left, request.arrival.prompt_tokens - request.prefilled)
            attention += chunk * (request.prefilled + chunk / 2)
            self._chunks.append((request, chunk))
            left -= chunk
        prefill = sum(chunk for _, chunk in self._chunks)
        work = StepWork(prefill_tokens=prefill, decode_count=len(self.running), context_tokens=context)
        return work, self.cost.seconds(work, attention)

    def end_step(self, now_s: float) -> None:
        """Every running sequence has a token more; prompts that are whole have their first."""
        self.step_count += 1
        self.context_tokens += len(self.running)
        while self._ends and self._ends[0][0] <= self.step_count:
            request = self.running.pop(heapq.heappop(self._ends)[1])
            request.ended_at_s = now_s
            self.context_tokens -= request.arrival.prompt_tokens + request.arrival.completion_tokens
        for request, chunk in self._chunks:
            request.prefilled += chunk
            if request.prefilled >= request.arrival.prompt_tokens:
                self._first_token(request, now_s)
        self._chunks = []
        self._state = None

    def _first_token(self, request: Served, now_s: float) -> None:
        assert self.waiting.popleft() is request
        request.first_at_s, request.started_step = now_s, self.step_count
        later = request.arrival.completion_tokens - 1
        if later <= 0:
            request.ended_at_s = now_s
            return
        index = len(self.served) + self.step_count * 1_000_000 + len(self.running)
        self.running[index] = request
        heapq.heappush(self._ends, (self.step_count + later, index))
        self.context_tokens += request.arrival.prompt_tokens + 1

    def token_count(self, request: Served) -> int:
        """Tokens that a running request has made."""
        return self.step_count - request.started_step + 1

    def state(self, now_s: float) -> ServingState:
        """What a perfect probe would show between two steps."""
        if self._state is None or self._state.seen_at_s != now_s:
            old = self._state
            self._state = ServingState(
                seen_at_s=now_s,
                waiting=old.waiting if old else self._waiting(),
                running=old.running if old else self._running(),
                kv_used_tokens=self.context_tokens,
                kv_capacity_tokens=self.kv_capacity_tokens,
            )
        return self._state

    def _waiting(self) -> tuple[WaitingRequest, ...]:
        return tuple(
            WaitingRequest(arrived_at_s=each.arrival.at_s, prefill_tokens=each.arrival.prompt_tokens - each.prefilled)
            for each in self.waiting
        )

    def _running(self) -> tuple[RunningRequest, ...]:
        made = [(each, self.token_count(each)) for each in self.running.values()]
        return tuple(
            RunningRequest(
                first_token_at_s=each.first_at_s,
                token_count=count,
                context_tokens=each.arrival.prompt_tokens + count,
            )
            for each, count in made
        )


@dataclass
class RolloutEngine:
    """Turns without end. What it did is counted as the seconds that it would have needed with the GPU to itself."""

    cost: StepCost
    sequence_count: int = 16
    context: int = 8192  # tokens of every sequence
    chunk_tokens: int = 512
    turn_tokens: int = 256  # made by a turn, after which its observation comes
    observation_tokens: int = 256
    harvested_s: float = 0.0
    token_count: int = 0
    step_count: int = 0
    _owed: float = 0.0  # prompt tokens of observations

    def work(self, step_tokens: int | None) -> StepWork:
        """What a step of at most that many tokens computes: decodes, then observations."""
        left = self.sequence_count + self.chunk_tokens if step_tokens is None else step_tokens
        decodes = min(self.sequence_count, left)
        chunk = min(int(self._owed), self.chunk_tokens, left - decodes) if self._owed >= self.observation_tokens else 0
        return StepWork(prefill_tokens=chunk, decode_count=decodes, context_tokens=decodes * self.context)

    def seconds(self, work: StepWork) -> float:
        """Time of a step, without noise."""
        return self.cost.seconds(work, work.prefill_tokens * (self.context + work.prefill_tokens / 2))

    def end_step(self, work: StepWork) -> None:
        """Count what the step brought."""
        self._owed += work.decode_count * self.observation_tokens / self.turn_tokens - work.prefill_tokens
        per_decode_s, per_prompt_token_s = self._worth
        self.harvested_s += work.decode_count * per_decode_s + work.prefill_tokens * per_prompt_token_s
        self.token_count += work.decode_count
        self.step_count += 1

    def __post_init__(self) -> None:
        context = self.sequence_count * self.context
        whole = StepWork(decode_count=self.sequence_count, context_tokens=context)
        chunked = replace(whole, prefill_tokens=self.observation_tokens)
        whole_s, chunked_s = self.seconds(whole), self.seconds(chunked)
        self._worth = whole_s / self.sequence_count, (chunked_s - whole_s) / self.observation_tokens


def noisy(seconds: float, sigma: float, dice: Random) -> float:
    """A step's time as it comes out."""
    return seconds * dice.lognormvariate(0.0, sigma) if sigma > 0 else seconds
