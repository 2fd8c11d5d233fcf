"""What sampling takes, how it travels, and what its refusals say."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from rollfab.fabric.contract.errors import InputError, WireError
from rollfab.fabric.contract.records import Sampling, TurnJob
from rollfab.fabric.contract.sampling import FIELDS, check_sampling, sampling_from, with_ends
from rollfab.fabric.contract.wire import HEADER

EVERY: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.05,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "max_tokens": 256,
    "stop": ["\n", "</answer>"],
    "stop_ids": [2, 7],
    "seed": 7,
    "logit_bias": {5: -100, "7": 2.5},
    "guided_json": {"type": "object"},
    "logprobs": 5,
    "prompt_logprobs": 0,
    "kept_tokens": True,
    "routed_experts": True,
}


def job(sampling: Sampling) -> TurnJob:
    return TurnJob(turn_id="g.0.0", agent_id="a", sampling=sampling, prompt_ids=np.arange(9, dtype=np.int32))


def sent(turn: TurnJob) -> Any:
    data = turn.encode()
    return orjson.loads(data[HEADER.size : HEADER.size + HEADER.unpack_from(data)[3]])["sampling"]


def with_row(row: Any) -> bytes:
    """A turn's bytes with another row of sampling."""
    data = job(Sampling()).encode()
    *magic, length = HEADER.unpack_from(data)
    meta = orjson.loads(data[HEADER.size : HEADER.size + length]) | {"sampling": row}
    head = orjson.dumps(meta)
    head += b" " * (-(HEADER.size + len(head)) % 8)
    return HEADER.pack(*magic, len(head)) + head + data[HEADER.size + length :]


def test_every_field_of_the_record_is_in_the_table() -> None:
    assert [each.name for each in fields(Sampling)] == list(FIELDS)
    assert EVERY.keys() | {"guided_regex", "guided_tag"} == FIELDS.keys()


def test_what_is_asked_for_arrives_and_defaults_take_no_bytes() -> None:
    for given in ({}, EVERY, {"guided_regex": "[0-9]+"}, {"guided_tag": {"type": "structural_tag"}}):
        sampling = sampling_from(check_sampling(given, "run 'r': sampling"))
        assert TurnJob.decode(job(sampling).encode()).sampling == sampling
        assert sent(job(sampling)).keys() == given.keys()
    assert sampling_from(check_sampling(EVERY, "s")).logit_bias == {5: -100, 7: 2.5}
    assert sent(job(Sampling(max_tokens=16, stop=()))) == {}


def test_a_turn_has_room_for_the_models_ends_beside_all_that_may_be_asked_for() -> None:
    asked = sampling_from(check_sampling({"stop_ids": list(range(1024))}, "s"))
    ended = with_ends(asked, [7, *range(2000, 2064), 7])
    assert ended.stop_ids == (*range(1024), *range(2000, 2064))
    assert TurnJob.decode(job(ended).encode()).sampling == ended
    with pytest.raises(InputError, match=r"stop_ids has 1,089 token ids with those that end the model's answers"):
        with_ends(asked, range(2000, 2065))


def test_rows_of_before_are_read() -> None:
    old = {"temperature": 1.0, "max_tokens": 32, "stop_ids": [4], "seed": None}
    assert TurnJob.decode(with_row(old)).sampling == Sampling(max_tokens=32, stop_ids=(4,))


BAD: dict[str, list[Any]] = {
    "temperature": [10**5000, -1, 0.001, 101, float("nan"), "1", True, None],
    "top_p": [0, -0.1, 1.1, float("nan"), "1"],
    "top_k": [-1, 1.5, True, 1 << 40],
    "min_p": [-0.1, 1.1, float("nan")],
    "presence_penalty": [2.1, -2.1, float("inf"), "1"],
    "frequency_penalty": [2.1, -2.1, float("nan")],
    "repetition_penalty": [0, 0.001, 101, float("nan")],
    "max_tokens": [0, -1, 1.5, "16", (1 << 53) + 1, 1 << 62],
    "stop": ["x", "", [""], [1], [None], ["x" * 1025], ["x"] * 65, {"x": 1}, 7, ["\ud800"], ["x" * (1 << 20)]],
    "stop_ids": ["7", [-1], [1.5], [True], [1 << 31], [1] * 1025, {1: 2}],
    "seed": [-1, 1 << 63, 1.0, "7", True],
    "logit_bias": [
        [1],
        {1: float("nan")},
        {1: 101},
        {-1: 1},
        {"a": 1},
        {"1.5": 1},
        {1: "x"},
        dict.fromkeys(range(1025), 1),
    ],
    "guided_json": ["{", "[]", "7", [], {"a": float("nan")}, {"a": object()}, "[" * (1 << 20), {"a": "x" * (1 << 16)}],
    "guided_regex": [7, "x" * (1 << 17), "\ud800"],
    "guided_tag": ["{", "[]", 7, "[" * (1 << 20), {"a": "x" * (1 << 16)}],
    "logprobs": [-1, 21, 1.5, True, "5"],
    "prompt_logprobs": [-1, 21, 0.5, False],
    "kept_tokens": [1, "yes"],
    "routed_experts": [1, []],
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_value_that_a_field_does_not_take_is_refused_with_what_it_would(name: str) -> None:
    for value in BAD[name]:
        with pytest.raises(InputError, match=re.escape(f"run 'r': sampling: {name} is ")) as caught:
            check_sampling({name: value}, "run 'r': sampling")
        assert str(caught.value).endswith(f"expected {FIELDS[name].takes}") and len(str(caught.value)) < 300


def test_half_a_character_is_refused_with_the_reason() -> None:
    for given, reason in (({"stop": ["\ud800"]}, "no lone surrogates"), ({"guided_regex": "\ud800"}, "as UTF-8")):
        with pytest.raises(InputError, match=reason):
            check_sampling(given, "s")


BAD_ROWS: dict[str, list[Any]] = {
    "temperature": [-1, 0.001, 101, "1", None],
    "top_p": [0, -0.1, 1.1, "1", None],
    "max_tokens": [0, -1, (1 << 53) + 1, 1 << 62, None],
    "seed": [-1, 1 << 63],
    "top_k": [-1, 1.5, 1 << 40],
    "presence_penalty": [3, "x"],
    "repetition_penalty": [0, 1e9],
    "stop": ["x", [""], [1], ["x" * 1025], ["x"] * 65, {"x": 1}, 7, None],
    "stop_ids": ["7", [-1], [1.5], [1 << 31], [1] * (1024 + 64 + 1)],
    "logit_bias": [[1], {"1": 101}, {"-1": 1}, {"a": 1}, {"1": "x"}, {str(key): 1 for key in range(1025)}, None],
    "guided_json": ["{", "[]", 7, "[" * (1 << 20)],
    "guided_regex": [7, "x" * (1 << 17), ["a"]],
    "guided_tag": ["{", "[]", 7],
    "top_q": [1],
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_row_that_holds_other_than_it_may_costs_itself(name: str) -> None:
    for value in BAD_ROWS[name]:
        with pytest.raises(WireError, match="TurnJob"):
            TurnJob.decode(with_row({name: value}))


def test_a_name_that_is_none_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match=r"run 'r': sampling has no 'top_q': did you mean top_p"):
        check_sampling({"top_q": 1}, "run 'r': sampling")
    with pytest.raises(InputError, match=r"has no 'stop_texts': its name is 'stop'"):
        check_sampling({"stop_texts": ["a"]}, "s")
    with pytest.raises(InputError, match="guided_json and guided_regex are both given"):
        check_sampling({"guided_json": {}, "guided_regex": "a"}, "s")
    with pytest.raises(InputError, match="guided_regex and guided_tag are both given"):
        check_sampling({"guided_tag": {}, "guided_regex": "a"}, "s")
    for name in (7, "x" * (1 << 20), None):
        with pytest.raises(InputError) as caught:
            check_sampling({name: 1}, "s")  # type: ignore[dict-item]
        assert len(str(caught.value)) < 500


def test_the_docs_have_every_field_with_what_it_takes() -> None:
    text = (Path(__file__).parents[4] / "docs/environments.md").read_text()
    for each in fields(Sampling):
        row = next((line for line in text.splitlines() if line.startswith(f"| `{each.name}` |")), "")
        assert FIELDS[each.name].takes.replace("|", r"\|") in row, each.name
