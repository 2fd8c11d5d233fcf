"""The engine protocol: the one door between a rollout worker and an inference engine.

- `generate` starts a request and returns; whatever ends is handed out, in batches, by `finished`.
- Aborting keeps the tokens made so far; nothing generated is thrown away.
- A pause has a reason, and each reason holds once: the engine runs only while no reason holds it.
- Weights change only between two engine steps, in place, and spans record which version made which token.
- Prompts share KV cache only under one salt, so that no time to a first token tells of another's prompts.
- What older weights computed is never shared with a request that begins later, unless that is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ...fabric.contract.images import Image
from ...fabric.contract.records import NO_IDS, NO_LOGPROBS, Float32, Int32, Sampling, Side
from ...fabric.format.codec import Bits as Bits
from ...fabric.format.layout import Layout
from ...fabric.versions.commit import Staged
from ...fabric.versions.commit import Writes as Writes

TurnsAtCommit = Literal["keep", "recompute"]  # what happens to the KV cache of requests in flight when weights change


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """Continue `prompt_ids` followed by `prior_ids`.

    prompt_ids: int32 (P,). prior_ids: int32 (T0,), tokens an earlier claim made; they count towards
    sampling.max_tokens and are not returned again. cache_salt: it shares KV cache with those of the same salt alone.
    images: those of prompt_ids, by the tokens that stand for them.
    """

    request_id: str
    prompt_ids: Int32
    sampling: Sampling
    prior_ids: Int32 = field(default_factory=lambda: NO_IDS)
    cache_salt: str = ""
    images: tuple[Image, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What a request made (new tokens only).

    completion_ids: int32 (T,). logprobs: float32 (T,), natural log under the distribution sampled from.
    versions: (start, end, policy_version) stretches that cover [0, T). finish_reason: "" while it runs, then
    stop, length, abort, error, or refused: as an error that no attempt mends. sides: what sampling asks to have
    recorded, of these tokens, and below 0 of those that were continued. first_token_s: from `generate` to the first of
    them; None: not measured. cached_token_count: of those that were continued, found in the prefix cache.
    """

    request_id: str
    finish_reason: str = ""
    completion_ids: Int32 = field(default_factory=lambda: NO_IDS)
    logprobs: Float32 = field(default_factory=lambda: NO_LOGPROBS)
    versions: tuple[tuple[int, int, int], ...] = ()
    error: str | None = None
    sides: tuple[Side, ...] = ()
    first_token_s: float | None = None
    cached_token_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Upper bounds that may change at any time; None: the engine's own."""

    running_count: int | None = None
    kv_tokens: int | None = None
    step_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """What the engine is doing now. Counts are since start.

    paused_by: why it makes no steps, for requests that it has: reasons given to `pause`, and "limits" where a limit of
    0 lets nothing run.
    """

    running_count: int
    waiting_count: int
    kv_used_fraction: float
    step_count: int
    token_count: int
    active_version: int
    paused_by: tuple[str, ...] = ()
    prompt_token_count: int = 0  # of requests that were begun, tokens of earlier claims included
    cached_token_count: int = 0  # of those, found in the prefix cache
    kv_capacity_tokens: int = 0  # 0: not known


class Engine(Protocol):
    """An inference engine that holds one model."""

    @property
    def name(self) -> str:
        """The program that runs, with its version, for people: "transformers 5.23.0", "vllm 0.32.0 (cpu)"."""
        ...

    @property
    def cannot(self) -> Mapping[str, str]:
        """Fields of sampling that it cannot do, and "images", each with the reason and what can.

        Known once it has started.
        """
        ...

    @property
    def cannot_resume(self) -> frozenset[str]:
        """Fields of sampling with which a turn cannot go on from prior tokens: it has to begin anew."""
        ...

    @property
    def layout(self) -> Layout:
        """Names, shapes and dtypes of its parameters, tied ones once."""
        ...

    async def start(self) -> None:
        """Build the model and start stepping. Raises EngineError; ConfigError: its device is not there."""
        ...

    async def close(self) -> None:
        """Stop; running requests are dropped."""
        ...

    def generate(self, request: GenerationRequest) -> None:
        """Start a request; never blocks.

        Raises:
            EngineUnsupported: its sampling asks for what this engine cannot do, or it takes no images; another may.
            EngineError: it can not fit, or holds other than it may.
        """
        ...

    async def finished(self, timeout_s: float) -> list[Generation]:
        """All requests that ended since the last call; waits up to `timeout_s` for the first."""
        ...

    def progress(self, request_ids: Sequence[str]) -> list[Generation]:
        """Tokens so far of running requests; those that are not running are left out."""
        ...

    async def abort(self, request_ids: Sequence[str]) -> list[Generation]:
        """End requests now and return what each has made, finish_reason "abort" (or its own, if it just ended)."""
        ...

    async def pause(self, reason: str) -> None:
        """Hold the engine between two steps, for one reason. Requests keep their KV cache.

        However often it is asked for, one reason holds once, and one `resume` takes it back.
        """
        ...

    async def resume(self, reason: str) -> None:
        """Take one reason back."""
        ...

    def set_limits(self, limits: EngineLimits) -> None:
        """Change the bounds; takes effect at the next step."""
        ...

    def weight_bits(self) -> Mapping[str, Bits]:
        """Stored bits of every parameter in host memory, flat, read only: live views on a CPU, a copy on a GPU."""
        ...

    async def apply(self, staged: Staged, *, turns: TurnsAtCommit = "keep", may_reuse_prefix: bool = False) -> float:
        """Write staged weights in place between two steps; returns the pause in seconds.

        A request that has no token yet starts over with the new weights. The others go on with their tokens, and their
        spans say where the version changed.

        Args:
            turns: "keep": requests in flight keep their KV cache, which older weights computed; only their next tokens
                are of the new ones. "recompute": it is computed again, as if all their tokens were a new prompt.
            may_reuse_prefix: requests that begin later may share what older weights left in the prefix cache. With
                "recompute" nothing of older weights is left to share.

        Raises:
            EngineUnsupported: this engine cannot keep the KV cache; nothing was written. It can recompute.
            WeightError: not applied.
        """
        ...

    async def read_weights(self) -> Mapping[str, Bits]:
        """Read bits as `weight_bits` does, but from where the engine computes with them: an audit must look there."""
        ...

    async def sleep(self) -> float:
        """Give the device's memory back, keeping the engine warm; returns seconds. Nothing may be running.

        Comes after a commit under way. Until `wake`, nothing is generated, applied or read; `stats`, `finished`,
        `pause`, `resume`, `set_limits` and `abort` answer as ever.

        Raises:
            EngineUnsupported: this engine can not, here; it is as it was.
            EngineError: whether it sleeps is not known; `wake` may make it well again.
        """
        ...

    async def wake(self) -> float:
        """Be ready to generate again, with the weights it had; returns seconds. Raises EngineError, as `sleep`."""
        ...

    def stats(self) -> EngineStats:
        """Tell what it does now."""
        ...
