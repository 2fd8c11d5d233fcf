"""The port between an engine's HTTP (api/inference) and the fleet that makes completions of token ids (workers/agent).

A request names no trajectory: its turns are asked for on trajectories that the serving process holds for this alone
(docs/decisions/0060). So what it makes is recorded nowhere but in its answer.

Errors of all calls: InputError (PayloadTooLarge among them) and ConfigError, what was asked for cannot be (facts:
is_over_context, the prompt is longer than the model's context); EngineUnsupported, the engine cannot do it; QueueFull,
the run holds too much; VersionUnmet, the pin cannot be met now; BrokerError and EngineError, try again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ..contract.records import Int32

INFERENCE = "inference"  # the environment of runs whose turns are asked for by requests, and that nobody plays
PauseMode = Literal["keep", "wait", "abort"]
KEEP: PauseMode = "keep"
WAIT: PauseMode = "wait"
ABORT: PauseMode = "abort"
PAUSE_MODES: tuple[PauseMode, ...] = (KEEP, WAIT, ABORT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """Which policy versions a request accepts for each of its tokens; None: any."""

    min_version: int | None = None
    exact_version: int | None = None

    def admits(self, version: int) -> bool:
        """Tell whether a token of this version may be in the answer."""
        if self.exact_version is not None and version != self.exact_version:
            return False
        return self.min_version is None or version >= self.min_version


ANY = Pin()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One request for completions of token ids, of whatever protocol.

    token_ids: int32, shape (P,). sampling: fields of Sampling by name; the run's own settings win. count: how many
    completions; a seed is that of the first one, and one more for each of the others. ends_at_eos: whether the tokens
    that end the model's answers end these. session: requests with the same one, one after the other, are turns of one
    trajectory as long as that lasts. request_id: by which `abort` finds it; empty: by none.
    """

    token_ids: Int32 = field(repr=False)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    count: int = 1
    ends_at_eos: bool = True
    session: str = ""
    request_id: str = ""
    pin: Pin = ANY


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tokens [start, end) of a completion, made at one policy version."""

    start: int
    end: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """One completion. finish: stop, length, or abort (then it has no tokens). resumed: in more than one claim.

    token_ids: with the one that ended it. logprobs: natural log, of the distribution that tokens were drawn from. tops:
    per token the likeliest ones, likeliest first, as (id, log-probability); empty: not asked for. stretches cover it.
    prompt_logprobs, prompt_tops: the same of the prompt's tokens, in the first completion alone; NaN: the first token.
    """

    token_ids: Sequence[int] = field(repr=False)
    logprobs: Sequence[float] = field(repr=False)
    finish: str
    tops: Sequence[Sequence[tuple[int, float]]] = field(default=(), repr=False)
    prompt_logprobs: Sequence[float] = field(default=(), repr=False)
    prompt_tops: Sequence[Sequence[tuple[int, float]]] = field(default=(), repr=False)
    stretches: Sequence[Stretch] = ()
    resumed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Completions:
    """The answer to a request. start_version, end_version: of its tokens; of no tokens: the head twice."""

    made: Sequence[Made]
    start_version: int
    end_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What clients may know. head_version: -1 before the first. dtype: of the run's weights; empty: not said.

    context_tokens_max: of the model, 0: not known.
    """

    run_id: str
    model: str
    head_version: int
    dtype: str
    context_tokens_max: int
    is_paused: bool
    running_count: int


class Inference(Protocol):
    """One run's completions."""

    @property
    def model(self) -> str:
        """The run's model."""
        ...

    @property
    def vocabulary_size(self) -> int:
        """Tokens below this number have a text."""
        ...

    async def facts(self) -> ServerFacts:
        """Say how it stands."""
        ...

    async def why_waiting(self) -> str:
        """Say why requests do not come forward, with the next step; empty: they do, or it cannot be read now."""
        ...

    async def generate(self, prompt: Prompt, *, outlasts_broker: bool = False) -> Completions:
        """Return completions, each of which is a turn. Cancelling it gives them up and frees their slots.

        outlasts_broker: whether it waits for as long as the broker is away; else it is given up after a while, with
        BrokerError.
        """
        ...

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, without special ones, and with a replacement character (U+FFFD) for each that the
        vocabulary lacks: models have room for more tokens than their tokenizer has."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Hold new requests back until `resume`. What is under way goes on (keep), is waited for, or given up.

        Requests that are given up are answered with finish "abort" and no tokens. It is paused, too, where BrokerError
        says that the wait for them was broken off.
        """
        ...

    async def resume(self) -> None:
        """Let requests in again."""
        ...

    def abort(self, request_ids: Sequence[str] | None) -> int:
        """Give requests up, by their ids, or all (None) that are under way; return how many."""
        ...

    async def publish(self, path: str, version: int | None, *, allow_nonfinite: bool = False) -> int:
        """Publish the weights of a directory of safetensors files; return their version.

        version: newer than the head; None: the one after it. Every request from now on has it, or newer ones, where the
        run's staleness is 0. allow_nonfinite: also new values that are NaN or infinite.

        Raises:
            ConfigError: the path is outside of the directory that weights may come from, or there is none.
            InputError (WeightsNotFinite among them), LayoutMismatch, VersionConflict: as AsyncRun.publish says.
        """
        ...
