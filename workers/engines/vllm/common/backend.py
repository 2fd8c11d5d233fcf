"""The calls that the vLLM engine makes of a vLLM: in this process (local.py) or behind a URL (attached/backend.py).

- A door knows requests by name and streams their tokens. engine.py knows who waits, what was aborted, and who holds
  the engine for which reason.
- Holding is not counted here: `hold` and `release` come in pairs, one at a time.
- Whatever vLLM raises leaves a door as EngineError, short, with the place of the log.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from numpy.typing import NDArray

from .....fabric.contract.limits import LOGPROB_COUNT_MAX
from .....fabric.contract.records import Float32, Sampling, Side
from .....fabric.format.layout import Layout
from ....serving.guarding.guard import GuardOrders
from ...base import EngineLimits, TurnsAtCommit, Writes

if TYPE_CHECKING:
    from .arena import Mirror


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The model's facts, known once the door is open.

    context_tokens_max: most tokens of prompt and completion. tokenizer: preset, path or hub name of it.
    logprob_count_max: most likeliest tokens that are told beside one.
    """

    name: str
    layout: Layout
    context_tokens_max: int
    vocabulary_size: int
    tokenizer: str = ""
    logprob_count_max: int = LOGPROB_COUNT_MAX


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Seen:
    """What the model reads at tokens [start, end), which stand for the image with this digest.

    pixel_values: float32 (N, D), its N pieces. image_grid_thw: int64 (3,), how many they are in time, height and width.
    """

    start: int
    end: int
    digest: str
    pixel_values: Float32
    image_grid_thw: NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request as a door gets it.

    input_ids: prompt and prior tokens; the last `prior_count` of them are prior. token_count_max: new tokens, at least
    one. stop_ids: all tokens that end it; its stop texts are looked for by whoever asks.
    cache_salt: of its prefixes; "": none. images: those of input_ids, in order.
    """

    request_id: str
    input_ids: list[int]
    token_count_max: int
    sampling: Sampling
    prior_count: int = 0
    stop_ids: tuple[int, ...] = ()
    cache_salt: str = ""
    images: tuple[Seen, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The next tokens of a stream.

    logprobs: natural log under the distribution sampled from (temperature 0: at temperature 1), one a token.
    finish_reason: stop, length or abort in the last chunk, else "".
    marks: (first token, version) of each stretch so far, as vLLM tells; None: it does not, the engine keeps its own.
    cached_token_count: tokens of the prompt found in the prefix cache; in the last chunk at the latest.
    sides: what sampling asks to have recorded; places count from this chunk's first token.
    """

    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    finish_reason: str = ""
    marks: Sequence[tuple[int, int]] | None = None
    cached_token_count: int = 0
    sides: tuple[Side, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LifeSigns:
    """Signs of life. step_count: grows with every step that ran a token. running_count: requests in the batch."""

    step_count: int
    running_count: int
    kv_used_fraction: float
    kv_capacity_tokens: int = 0  # 0: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """The abilities of this vLLM, found by trying; notes tell a person what is missing."""

    name: str  # as it is shown: "vllm 0.32.0 (cpu)", "vllm server 0.32.0"
    weights: str  # "deltas", "reload" or "fixed"
    sleeps: bool = False
    notes: tuple[str, ...] = field(default=())  # what is missing, and what to start the server with
    cannot: Mapping[str, str] = field(default_factory=dict)  # see Engine.cannot
    cannot_resume: frozenset[str] = frozenset()  # see Engine.cannot_resume


class Door(Protocol):
    """One vLLM. Every method may raise EngineError."""

    @property
    def facts(self) -> ModelFacts: ...

    @property
    def abilities(self) -> Abilities: ...

    async def open(self) -> None:
        """Start the vLLM, or find out about a server that runs."""
        ...

    async def close(self) -> None:
        """End the vLLM and everything it started; never raises."""
        ...

    def check(self) -> None:
        """Raise EngineError if the vLLM is gone."""
        ...

    def stream(self, ask: Ask) -> AsyncGenerator[Chunk, None]:
        """Begin a request; ends after a chunk with a finish_reason. Closing it earlier ends the request."""
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; each stream's last chunk then says "abort", or how it had ended by itself."""
        ...

    async def hold(self) -> None:
        """Hold the engine: no step follows once this has returned, and every token made before has been streamed.

        Streams stay open.
        """
        ...

    async def release(self) -> None:
        """Go on after `hold`."""
        ...

    def set_limits(self, limits: EngineLimits) -> None:
        """Set limits that hold from the next step on."""
        ...

    def life_signs(self) -> LifeSigns:
        """Return signs of life as of now; costs microseconds."""
        ...

    def guard_from_now(self) -> None:
        """Put the steps from here on under the guard that the door was opened with, if any."""
        ...

    def order(self, orders: GuardOrders) -> None:
        """Give the guard orders that hold from the next step on; does nothing without a guard."""
        ...

    def guard_said(self) -> bytes | None:
        """Return what the guard said last, see engines/vllm/step/scheduler.py; None: nothing, or ask again."""
        ...

    def check_turns(self, turns: TurnsAtCommit) -> None:
        """Raise EngineUnsupported if `turns` cannot become of requests in flight at a commit."""
        ...

    async def write(self, writes: Writes, version: int) -> None:
        """Write stored bits in place and name them `version`; called while held.

        Raises:
            WeightError: not written; says whether the engine still holds what it held.
        """
        ...

    async def forget_prefixes(self, turns: TurnsAtCommit) -> None:
        """Have requests that begin from now on share nothing computed before; called while held, after `write`.

        turns: "keep": those in flight keep their KV cache; "recompute": it is computed again.
        """
        ...

    async def read(self, into: Mirror) -> None:
        """Fill `into` with the stored bits that the vLLM computes with."""
        ...

    async def sleep(self) -> None:
        """Put the engine to sleep, see Engine.sleep. Raises EngineUnsupported."""
        ...

    async def wake(self) -> None: ...

    async def release_kv(self) -> None:
        """Unmap the KV cache, keeping the weights; no request may be inside. Raises EngineUnsupported."""
        ...

    async def take_kv(self) -> None:
        """Map the KV cache again; vLLM then goes on by itself."""
        ...
