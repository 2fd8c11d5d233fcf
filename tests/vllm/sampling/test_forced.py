"""Grammars of forced tool calls, kept by xgrammar: what they let through is read back as the calls that were asked for.

A walk draws among the tokens that a grammar allows, often a character that quotes or ends something, until it ends.
"""

from __future__ import annotations

import json
import random
from functools import cache, cached_property
from typing import Any

import jsonschema
import numpy as np
import pytest
import xgrammar

from rollfab.fabric.chat.choice import Model, ToolChoice, tag_of
from rollfab.fabric.chat.forms import Call, find_form, read_answer
from rollfab.fabric.chat.messages import check_messages, check_tools
from rollfab.fabric.chat.template import ChatTemplate
from rollfab.fabric.contract.errors import InputError
from tests.unit.fabric.chat.families import FAMILIES, build_tokenizer, chat_template

STEP_COUNT_MAX = 4000
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "description": "where"},
        "code": {"type": "string", "minLength": 2, "maxLength": 6},
        "kind": {"enum": ["near", "</tool_call>", '한 "é" 🤣', 7]},
        "key": {"type": "string", "pattern": "^(?:[a-z]{2}|\\d+)[A-Z]?$"},
        "day": {"type": "string", "format": "date"},
        "count": {"type": "integer", "exclusiveMinimum": 1, "maximum": 20.5},
        "share": {"type": ["number", "null"], "minimum": 0},
        "spots": {"type": "array", "items": {"$ref": "#/$defs/Spot"}, "minItems": 1, "maxItems": 2},
        "way": {"anyOf": [{"type": "string"}, {"type": "boolean"}]},
    },
    "required": ["place", "count", "spots"],
    "$defs": {"Spot": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
}
LOOK = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": PARAMETERS}}
LOOK_AT = {"type": "function", "function": {"name": "look_at", "parameters": {"type": "object", "properties": {}}}}
TOOLS = check_tools([LOOK, LOOK_AT])
ASKED = check_messages([{"role": "user", "content": "look"}])
REQUIRED, ONE, NAMED = (
    ToolChoice(is_forced=True),
    ToolChoice(is_forced=True, is_single=True),
    ToolChoice(is_forced=True, name="look"),
)
AT_MOST_ONE = ToolChoice(is_single=True)
FORCED = ("qwen2.5", "qwen3", "qwen3-thinking", "llama-3", "mistral", "deepseek-r1", "deepseek-distilled", "gpt-oss")


@cache
def compiler(family: str) -> xgrammar.GrammarCompiler:
    tokenizer = build_tokenizer(FAMILIES[family])
    return xgrammar.GrammarCompiler(xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer)))


class Walker:
    """A grammar at work, as vLLM has it work: the turn's stop tokens come where it is complete, and nowhere else."""

    def __init__(self, family: str, choice: ToolChoice, **options: Any) -> None:
        self.chat: ChatTemplate = chat_template(family)
        self.prompt = self.chat.render(ASKED, TOOLS, answer=True, options=options)
        self.tag = self.chat.tag(choice, TOOLS, prompt=self.prompt)
        compiled = compiler(family).compile_structural_tag(self.tag)
        self._matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=list(self.chat.stop_ids))
        self._size = len(build_tokenizer(FAMILIES[family]))
        self._mask = xgrammar.allocate_token_bitmask(1, self._size)

    def allowed(self) -> list[int]:
        self._matcher.fill_next_token_bitmask(self._mask, 0)
        bits = np.unpackbits(self._mask[0].numpy().view(np.uint8), bitorder="little")
        return [int(each) for each in np.flatnonzero(bits[: self._size])]

    def takes(self, ids: list[int]) -> bool:
        """Whether an answer of these tokens is of the grammar, and whole."""
        return all(map(self._matcher.accept_token, ids)) and self._matcher.is_terminated()

    def walk(self, dice: random.Random) -> str:
        """An answer of tokens as they come, without the one that ends it."""
        ids: list[int] = []
        for _ in range(STEP_COUNT_MAX):
            allowed = self.allowed()
            ending = [each for each in allowed if each in self.chat.stop_ids]
            if ending and (dice.random() < 0.3 or len(ending) == len(allowed)):
                assert self._matcher.accept_token(ending[0]) and self._matcher.is_terminated()
                return self.chat.decode(ids)
            inner = [each for each in allowed if each not in ending]
            marks = [each for each in inner if each in self.marks]
            ids.append(dice.choice(marks if marks and dice.random() < 0.3 else inner))
            assert self._matcher.accept_token(ids[-1])
        raise AssertionError("the walk came to no end")

    @cached_property
    def marks(self) -> set[int]:
        """Tokens that end something, or quote what ends something."""
        encode = self.chat.encode
        return {int(encode(each)[0]) for each in ('"', "}", "]", ",", "\\")} | set(self.chat._added.values())


def options_of(family: str) -> list[dict[str, Any]]:
    return [{}, {"enable_thinking": False}] if family == "qwen3" else [{}]


@pytest.mark.parametrize("family", FORCED)
@pytest.mark.parametrize("choice", [REQUIRED, ONE, NAMED], ids=["required", "one", "named"])
def test_whatever_a_forced_grammar_lets_through_is_read_as_fitting_calls(family: str, choice: ToolChoice) -> None:
    counts = set()
    for options in options_of(family):
        for seed in range(12):
            walker = Walker(family, choice, **options)
            text = walker.walk(random.Random(f"{family} {seed}"))
            _, content, calls = walker.chat.read(text, prompt=walker.prompt, tools=TOOLS)
            assert calls and not content, text
            for call in calls:
                schema = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}[call.name]
                jsonschema.validate(json.loads(call.arguments), schema)
                assert choice.name in ("", call.name)
            counts.add(len(calls))
    assert counts == {1} if choice != REQUIRED or family in ("llama-3", "gpt-oss") else max(counts) > 1


@pytest.mark.parametrize("family", FORCED)
def test_what_a_policy_of_the_family_writes_is_of_the_grammar(family: str) -> None:
    arguments = {"place": "Rome", "count": 3, "spots": [{"x": 2.5}]}
    first = {"id": "abcdefgh1", "function": {"name": "look", "arguments": json.dumps(arguments)}}
    second = {"id": "abcdefgh2", "function": {"name": "look_at", "arguments": "{}"}}
    wrong = {"id": "abcdefgh3", "function": {"name": "look", "arguments": json.dumps(arguments | {"count": 21})}}
    written = FAMILIES[family].write
    is_many = family not in ("llama-3", "gpt-oss")

    def takes(choice: ToolChoice, *calls: Any, content: str = "") -> bool:
        message: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": list(calls)}
        if FAMILIES[family].has_reasoning:
            message["reasoning_content"] = "first the place"
        text, end = written(message)
        if family == "mistral":  # its history has ids, which a policy does not write
            text = text.replace(', "id": "abcdefgh1"', "").replace(', "id": "abcdefgh2"', "")
            text = text.replace("[TOOL_CALLS] ", "[TOOL_CALLS]")  # its tokenizer puts a space there by itself
        chat = chat_template(family)
        text = text.replace("<think>\n", "", 1) if family.endswith("r1") else text
        ids = [int(each) for each in chat.encode(text + end)]
        return Walker(family, choice).takes(ids)

    assert takes(REQUIRED, first) and takes(ONE, first) and takes(NAMED, first)
    assert takes(REQUIRED, second) and not takes(NAMED, second), "another one is named"
    assert takes(REQUIRED, first, second) if is_many else True
    assert not takes(ONE, first, second) or not is_many
    assert not takes(REQUIRED, wrong), "its arguments do not fit"
    assert not takes(REQUIRED, content="no") and not takes(NAMED, content="no")


@pytest.mark.parametrize("family", [name for name in FORCED if name not in ("llama-3", "gpt-oss")])
def test_at_most_one_call_leaves_all_else_to_the_policy(family: str) -> None:
    call = {"id": "abcdefgh1", "function": {"name": "look_at", "arguments": "{}"}}
    for count, content in ((0, "no"), (1, ""), (1, "well"), (2, "")):
        message = {"role": "assistant", "content": content, "reasoning_content": "ah", "tool_calls": [call] * count}
        text, end = FAMILIES[family].write(message)
        text = text.replace(', "id": "abcdefgh1"', "").replace("[TOOL_CALLS] ", "[TOOL_CALLS]")
        text = content + text if family == "mistral" and count else text
        walker = Walker(family, AT_MOST_ONE)
        assert walker.takes([int(each) for each in walker.chat.encode(text + end)]) == (count < 2), text
    for seed in range(12):
        walker = Walker(family, AT_MOST_ONE)
        text = walker.walk(random.Random(f"{family} {seed}"))
        assert len(walker.chat.read(text, prompt=walker.prompt, tools=TOOLS)[2]) <= 1


@pytest.mark.parametrize(
    ("signs", "text", "answer"),
    [
        ("[INST]", "[ARGS]", "[TOOL_CALLS]look_at[ARGS]{}[TOOL_CALLS]look_at[ARGS]{}"),
        (
            "<｜Assistant｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look_at<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
            "<｜tool▁call▁begin｜>look_at<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        ("<|channel|>", "", "<|channel|>commentary to=functions.look_at <|constrain|>json<|message|>{}"),
    ],
    ids=["mistral by names", "deepseek by lines", "gpt-oss by channels"],
)
def test_other_templates_of_a_family_have_their_own_grammar(signs: str, text: str, answer: str) -> None:
    model = Model(name="m", text=text, form=find_form(signs), tags=None)
    compiled = compiler("qwen3").compile_structural_tag(tag_of(REQUIRED, TOOLS, model, ""))
    matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=True)
    assert matcher.accept_string(answer)
    reading = read_answer(model.form, answer, {}, None, is_open=False)
    assert reading == ("", "", [Call("look_at", "{}")] * answer.count("look_at"))


def test_a_form_whose_calls_no_grammar_can_promise_is_refused_by_name() -> None:
    for family, reason in (("glm-4.5", "without quotes"), ("gpt-oss", "takes no bound")):
        chat = chat_template(family)
        choice = REQUIRED if family == "glm-4.5" else AT_MOST_ONE
        with pytest.raises(InputError, match=reason):
            chat.tag(choice, TOOLS, prompt="")
