"""The two routes by which a vLLM server makes tokens of tokens, and what its log-probabilities mean.

- Everything that the server's generation config could set is sent, so that the distribution is the model's own.
- /inference/v1/generate: ids in, ids out, nothing turned into text; only where scale-out is enabled.
- /v1/completions: on every server; it also makes text, which is thrown away.
- JSON carries float32 exactly (as the shortest decimal of its double); vLLM sends -9999 for minus infinity.
- Of k likeliest tokens /inference/v1/generate leaves the last out where the token that was drawn is none of them, so it
  is asked for one more; where the server tells no more, /v1/completions is asked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from .....fabric.contract.errors import EngineError
from .....fabric.contract.limits import LOGPROB_COUNT_MAX
from .....fabric.contract.sampling import CUTS
from .....fabric.contract.sides import Side
from ..common.backend import Ask
from ..common.beside import likeliest_of, table, top_sides
from .client import Client

# All that a generation config may change, at the values that change nothing.
NEUTRAL = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
    "ignore_eos": True,
    "n": 1,
}
SENT = ("logit_bias", "repetition_penalty", *CUTS)  # fields of Sampling, by vLLM's names; CANNOT has the others
PROBE_IDS = [0]
PROBE_TEMPERATURE = 0.05  # far from 1: log-probabilities after temperature then differ by more than rounding
PROBE_TOP = 5
SAME = 0.01  # nats; bfloat16 and other batches move a log-probability by less
PROCESSED = "--logprobs-mode processed_logprobs"
NEVER = -9999.0  # what vLLM sends for minus infinity
Likeliest = tuple[Sequence[int], Sequence[float]]  # ids and log-probabilities beside one token, likeliest first
NAMED = "token_id:"  # what it puts before a token's id
REFUSED = 400


@dataclass(frozen=True, slots=True)
class Piece:
    """One event. finish_reason: as vLLM says it, "" while the request goes on. cached_token_count: None: not told.

    sides: of these tokens, from place 0 on.
    """

    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    finish_reason: str = ""
    cached_token_count: int | None = None
    sides: tuple[Side, ...] = ()


class Route(Protocol):
    """A way to ask for tokens. stream_interval: tokens that make an event; the first and the last make one at once.

    logprob_count_max: likeliest tokens beside each that it tells.
    """

    path: str
    logprob_count_max: int

    def body(
        self, ask: Ask, input_ids: list[int], token_count_max: int, seed: int | None, *, stream_interval: int
    ) -> dict[str, Any]: ...

    def piece(self, event: Mapping[str, Any], ask: Ask) -> Piece:
        """Read an event.

        Raises:
            KeyError, TypeError, IndexError, AttributeError, ValueError: it is not as we know it.
        """
        ...


class GenerateRoute:
    """The route /inference/v1/generate. logprob_count_max: likeliest tokens that the server tells, less one."""

    path = "/inference/v1/generate"

    def __init__(self, logprob_count_max: int = 0) -> None:
        self.logprob_count_max = logprob_count_max

    def body(
        self, ask: Ask, input_ids: list[int], token_count_max: int, seed: int | None, *, stream_interval: int
    ) -> dict[str, Any]:
        count = ask.sampling.logprobs
        parameters = {
            **_parameters(ask, token_count_max, seed, stream_interval),
            "logprobs": count + 1 if count else 0,
            "detokenize": False,
        }
        return {"token_ids": input_ids, "sampling_params": parameters, **_salt(ask), **_STREAMED}

    def piece(self, event: Mapping[str, Any], ask: Ask) -> Piece:
        if not event["choices"]:
            return Piece(cached_token_count=_cached_token_count(event))
        choice = event["choices"][0]
        content = (choice["logprobs"] or {}).get("content") or ()
        logprobs = [entry["logprob"] for entry in content]
        count = ask.sampling.logprobs
        sides = _sides([_likeliest(entry["top_logprobs"], count) for entry in content], count) if count else ()
        return Piece(choice["token_ids"] or (), logprobs, choice["finish_reason"] or "", sides=sides)


def _likeliest(told: Sequence[Mapping[str, Any]], count: int) -> Likeliest:
    """Choose the likeliest of what is told beside one token: one more, or the drawn one, which is then the least."""
    found = sorted(told, key=lambda each: -each["logprob"])[:count]
    return [each["token_id"] for each in found], [each["logprob"] for each in found]


class CompletionsRoute:
    """The route /v1/completions, which tells all that the server does. model: the name that it is served by."""

    path = "/v1/completions"
    logprob_count_max = LOGPROB_COUNT_MAX

    def __init__(self, model: str) -> None:
        self._model = model

    def body(
        self, ask: Ask, input_ids: list[int], token_count_max: int, seed: int | None, *, stream_interval: int
    ) -> dict[str, Any]:
        own = {"model": self._model, "prompt": input_ids, "return_token_ids": True, "return_tokens_as_token_ids": True}
        return {**own, **_parameters(ask, token_count_max, seed, stream_interval), **_salt(ask), **_STREAMED}

    def piece(self, event: Mapping[str, Any], ask: Ask) -> Piece:
        if not event["choices"]:
            return Piece(cached_token_count=_cached_token_count(event))
        choice = event["choices"][0]
        told = choice.get("logprobs") or {}
        ids, logprobs = choice.get("token_ids") or (), told.get("token_logprobs") or ()
        count = ask.sampling.logprobs
        rows = told["top_logprobs"] if count and ids else ()
        sides = _sides(
            [likeliest_of([int(name.removeprefix(NAMED)) for name in row], list(row.values()), count) for row in rows],
            count,
        )
        return Piece(ids, logprobs, choice.get("finish_reason") or "", sides=sides)


def _sides(found: Sequence[Likeliest], count: int) -> tuple[Side, ...]:
    """Return the arrays of the likeliest tokens beside each."""
    if not found:
        return ()
    ids, logprobs = table(found, count)
    return top_sides((ids, np.where(logprobs <= NEVER, np.float32(-np.inf), logprobs)))


_STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


def _parameters(ask: Ask, token_count_max: int, seed: int | None, stream_interval: int) -> dict[str, Any]:
    row = ask.sampling.row()
    given = {
        "temperature": ask.sampling.temperature,
        **{name: row[name] for name in SENT if name in row},
        "max_tokens": token_count_max,
        "stop_token_ids": list(ask.stop_ids),
        "logprobs": ask.sampling.logprobs,
        "stream_interval": stream_interval,
    }
    return {**NEUTRAL, **given, **({} if seed is None else {"seed": seed})}


def _salt(ask: Ask) -> dict[str, str]:
    """The server refuses an empty one."""
    return {"cache_salt": ask.cache_salt} if ask.cache_salt else {}


def _cached_token_count(event: Mapping[str, Any]) -> int | None:
    details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
    count: int | None = details.get("cached_tokens")
    return count


async def find_route(client: Client, model: str, logprob_count_max: int) -> Route:
    """Choose the better of the routes that this server has, and that knows all that is sent to it.

    logprob_count_max: likeliest tokens that the server tells beside one, at least 1.
    """
    parameters = {**NEUTRAL, "max_tokens": 1, "temperature": 0.0, "detokenize": False, "stream_interval": 1}
    body = {"token_ids": PROBE_IDS, "sampling_params": {**parameters, "logprobs": 1}}
    reply = await client.call("POST", GenerateRoute.path, body)
    if not reply.is_ok:
        return CompletionsRoute(model)
    return GenerateRoute(logprob_count_max - 1 if _names_tokens(reply.data) else 0)


def _names_tokens(data: Any) -> bool:
    """Tell whether an answer names the likeliest tokens by their ids, as vLLM 0.32 does and versions before did not."""
    try:
        ids, _ = _likeliest(data["choices"][0]["logprobs"]["content"][0]["top_logprobs"], 1)
    except (KeyError, TypeError, IndexError):
        return False
    return len(ids) == 1


async def reports_processed_logprobs(client: Client, model: str) -> bool:
    """Tell whether log-probabilities are those after temperature, by asking the same at two temperatures.

    Raises:
        EngineError: they are no log-probabilities.
    """
    at_one = await _top_logprobs(client, model, 1.0)
    at_low = await _top_logprobs(client, model, PROBE_TEMPERATURE)
    if any(sum(map(math.exp, found.values())) > 1 + SAME for found in (at_one, at_low)):
        raise EngineError(
            f"vLLM server {client.url} reports logits where log-probabilities are asked for: start it with {PROCESSED}",
            url=client.url,
        )
    likely = at_one.keys() & at_low.keys()  # one of each may be the token that was drawn, and likely nowhere else
    return any(abs(at_one[token] - at_low[token]) > SAME for token in likely)


async def find_logprob_count_max(client: Client, model: str, vocabulary_size: int) -> int:
    """Find by trying how many likeliest tokens the server tells beside one; it tells PROBE_TOP.

    Raises:
        EngineError: it answers neither that it does nor that it does not.
    """
    most = tried = min(LOGPROB_COUNT_MAX, vocabulary_size)
    known = min(PROBE_TOP, most)
    while known < most:
        if await _tells(client, model, tried):
            known = tried
        else:
            most = tried - 1
        tried = (known + most + 1) // 2
    return known


async def _tells(client: Client, model: str, count: int) -> bool:
    reply = await client.call("POST", CompletionsRoute.path, _one_token(model, 1.0, count))
    if not reply.is_ok and reply.status != REFUSED:
        raise client.refusal(CompletionsRoute.path, reply)
    return reply.is_ok


async def _top_logprobs(client: Client, model: str, temperature: float) -> dict[str, float]:
    data = await client.ask("POST", CompletionsRoute.path, _one_token(model, temperature, PROBE_TOP))
    found: dict[str, float] = data["choices"][0]["logprobs"]["top_logprobs"][0]
    return found


def _one_token(model: str, temperature: float, logprob_count: int) -> dict[str, Any]:
    return {
        **NEUTRAL,
        "model": model,
        "prompt": PROBE_IDS,
        "max_tokens": 1,
        "logprobs": logprob_count,
        "return_tokens_as_token_ids": True,
        "temperature": temperature,
    }
