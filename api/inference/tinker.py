"""Tinker's sampling API: sessions, samples, and futures that are asked for until they are done.

Source: tinker 0.38.0, tinker/resources and tinker/proto/tinker_public_pb2.pyi. What is sampled comes back as its
protobuf message SampleResponse, whose few fields are written here.

- A sampling session's name says which version it is pinned to, and nothing about it is kept.
- A sample's name is its session's, its number, and a digest of what is asked for: a request that comes again gets the
  same future, and one of another process that counts alike another.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from ...fabric.contract.errors import InputError
from ...fabric.contract.ids import new_request_id
from ...fabric.contract.limits import LOGPROB_COUNT_MAX, PROMPT_TOKENS_MAX
from ...fabric.contract.sampling import check_sampling, shown
from ...fabric.ports.inference import ANY, Completions, Made, Pin, Prompt
from ..gateway.body import COUNT_MAX, Body, take_sampling
from .fields import token_ids

SAMPLER = re.compile(r"([\w.-]{1,80}):(\d{1,9}):(\d{1,15})?")  # session, number in it, version that it is pinned to
MODEL_PATH = re.compile(r"tinker://([^/]+)/(?:\w+/)?(\d{1,15})")
EMPTY_CELL = (0, -99999.0)  # of a table of likeliest tokens
STOP, LENGTH = 0, 1  # StopReason
VARINT, BYTES = 0, 2  # protobuf's wire types


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A sample, understood. name: of its future. sequence_ids: one for each completion."""

    prompt: Prompt
    name: str
    top_count: int
    wants_prompt: bool
    prompt_top_count: int

    @property
    def sequence_ids(self) -> list[str]:
        """Name its completions."""
        return [f"{self.name}:{index}" for index in range(self.prompt.count)]


def read_sampler(body: Body, run_id: str, model: str) -> str:
    """Read a request for a sampling session; return its name. Raises InputError: it wants another model."""
    session, number = body.required("session_id", str), body.required("sampling_session_seq_id", int)
    base, path = body.optional("base_model", str), body.optional("model_path", str)
    body.ignore("type")
    version = ""
    if path is not None:
        found = MODEL_PATH.fullmatch(path)
        if found is None or found[1] != run_id:
            raise InputError(
                f"the request: model_path is {shown(path)}, expected tinker://{run_id}/VERSION, a version of this run's"
                " weights; leave it out for the newest",
                name="model_path",
            )
        version = found[2]
    elif base != model:
        raise InputError(f"the request: base_model is {shown(base)}, here is {model!r} alone", name="base_model")
    name = f"{session}:{number}:{version}"
    if SAMPLER.fullmatch(name) is None:
        raise InputError(
            f"the request: session_id is {shown(session)}, which this server never gave", name="session_id"
        )
    return name


def pin_of(sampler: str) -> Pin:
    """Return which versions a sampling session accepts. Raises InputError: it is none."""
    found = SAMPLER.fullmatch(sampler)
    if found is None:
        text = f"the request: sampling_session_id is {shown(sampler)}, which this server never gave"
        raise InputError(text, name="sampling_session_id")
    return Pin(exact_version=int(found[3])) if found[3] else ANY


def read_sample(body: Body) -> Asked:
    """Read a request for a sample. Raises InputError."""
    sampler = body.required("sampling_session_id", str)
    pin, number = pin_of(sampler), body.required("seq_id", int)
    sampling, ends_at_eos = _sampling(Body(body.required("sampling_params", dict), "sampling_params"))
    top_count = _count(body, "topk_sample_logprobs")
    prompt_top_count = _count(body, "topk_prompt_logprobs")
    wants_prompt = body.flag("prompt_logprobs") or prompt_top_count > 0
    if top_count:
        sampling["logprobs"] = top_count
    if wants_prompt:
        sampling["prompt_logprobs"] = prompt_top_count
    body.ignore("type", "base_model", "model_path")
    body.allow("record_stability_info", advice="leave it out")
    for name in ("target_prompt_logprobs", "prompt_alt_tokens_k", "prompt_logprobs_last_n"):
        body.allow(name, advice="ask for prompt_logprobs or topk_prompt_logprobs")
    ids, count = token_ids(_chunks(Body(body.required("prompt", dict), "prompt")), "prompt"), _samples(body)
    settings = repr((sampling, count, ends_at_eos, wants_prompt)).encode()
    name = f"{sampler}:{number}:{blake2b(ids.tobytes() + settings, digest_size=8).hexdigest()}"
    prompt = Prompt(
        token_ids=ids,
        sampling=sampling,
        count=count,
        ends_at_eos=ends_at_eos,
        pin=pin,
        request_id=name,
    )
    return Asked(
        prompt=prompt, name=name, top_count=top_count, wants_prompt=wants_prompt, prompt_top_count=prompt_top_count
    )


def _chunks(body: Body) -> list[Any]:
    """Return the tokens of all chunks. Raises InputError: one has none."""
    ids: list[Any] = []
    for chunk in body.required("chunks", list):
        fields = Body(chunk, "prompt.chunks")
        kind = fields.take("type")
        if kind not in (None, "encoded_text"):
            text = f"prompt.chunks: type is {shown(kind)}, expected encoded_text: only tokens are taken here"
            raise InputError(text, name="prompt")
        ids += fields.required("tokens", list)
        fields.close()
    body.close()
    return ids


def _sampling(fields: Body) -> tuple[dict[str, Any], bool]:
    stops = fields.take("stop")
    sampling = take_sampling(fields, length=("max_tokens",), stop=None)
    sampling.setdefault("max_tokens", PROMPT_TOKENS_MAX)
    fields.close()
    if isinstance(stops, list) and stops and all(isinstance(each, int) for each in stops):
        sampling |= check_sampling({"stop_ids": stops}, "sampling_params")
    elif stops:
        sampling |= check_sampling({"stop": [stops] if isinstance(stops, str) else stops}, "sampling_params")
    return sampling, stops != []  # an empty list: nothing ends an answer but its length


def _count(body: Body, name: str) -> int:
    count = body.optional(name, int) or 0
    if not 0 <= count <= LOGPROB_COUNT_MAX:
        raise InputError(f"the request: {name} is {count}, expected 0 to {LOGPROB_COUNT_MAX}", name=name)
    return count


def _samples(body: Body) -> int:
    count = body.optional("num_samples", int)
    if count is not None and not 1 <= count <= COUNT_MAX:
        raise InputError(f"the request: num_samples is {count}, expected 1 to {COUNT_MAX}", name="num_samples")
    return count or 1


def new_session() -> str:
    """Name a session."""
    return f"session-{new_request_id()}"


# ---------------------------------------------------------------- protobuf


def sampled(asked: Asked, answer: Completions) -> bytes:
    """Write a SampleResponse."""
    parts = [_bytes(1, _sequence(asked, made)) for made in answer.made]
    first = answer.made[0]
    if asked.wants_prompt:
        parts.append(_bytes(2, np.asarray(first.prompt_logprobs, np.float32).tobytes()))
    if asked.prompt_top_count:
        parts.append(_bytes(3, _table(first.prompt_tops, asked.prompt_top_count)))
    return b"".join(parts)


def _sequence(asked: Asked, made: Made) -> bytes:
    parts = [
        _number(1, LENGTH if made.finish == "length" else STOP),
        _bytes(2, np.asarray(made.token_ids, np.int32).tobytes()),
        _bytes(3, np.asarray(made.logprobs, np.float32).tobytes()),
    ]
    if asked.top_count:
        parts.append(_bytes(4, _table(made.tops, asked.top_count)))
    return b"".join(parts)


def _table(rows: Sequence[Sequence[tuple[int, float]]], count: int) -> bytes:
    """Write TopkLogprobs: `count` cells a row."""
    cells = [[*row, *[EMPTY_CELL] * count][:count] for row in rows]
    ids = np.array([[cell[0] for cell in row] for row in cells], np.int32)
    logprobs = np.array([[cell[1] for cell in row] for row in cells], np.float32)
    return b"".join((_bytes(1, ids.tobytes()), _bytes(2, logprobs.tobytes()), _number(3, count), _number(4, len(rows))))


def _bytes(field: int, data: bytes) -> bytes:
    return bytes([*_varint(field << 3 | BYTES), *_varint(len(data))]) + data


def _number(field: int, value: int) -> bytes:
    return bytes([*_varint(field << 3 | VARINT), *_varint(value)])


def _varint(value: int) -> Iterator[int]:
    """Yield the bytes of a number, seven bits in each, the lowest first."""
    assert value >= 0
    while value > 0x7F:
        yield value & 0x7F | 0x80
        value >>= 7
    yield value
