"""Which calls may be forced: the closed list of keywords, names that can be written, and reading what quotes marks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollfab.fabric.chat.choice import FREE, NUMBER_MAX, ToolChoice, closed, read_choice
from rollfab.fabric.chat.messages import check_tools
from rollfab.fabric.contract.errors import InputError
from tests.unit.fabric.chat.families import FAMILIES, chat_template

REQUIRED = ToolChoice(is_forced=True)


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, **({} if parameters is None else {"parameters": parameters})},
    }


def of(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, **more}


def inner(schema: Any, **more: Any) -> Any:
    """What becomes of a property's schema."""
    return closed(of(schema, **more), "tool 't'")["properties"]["a"]


def test_parameters_become_what_a_grammar_keeps_to() -> None:
    nothing = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
    assert closed({}, "t") == closed({"title": "T", "$schema": "x"}, "t") == nothing
    whole = of({"type": "string", "description": "d", "default": "x"}, required=["a"], additionalProperties=True)
    assert closed(whole, "t") == of({"type": "string"}, required=["a"], additionalProperties=False)
    assert inner({"type": "string", "format": "date"})["format"] == "date"
    assert inner({"type": "string", "format": "uri"}) == {"type": "string"}, "an annotation"
    assert inner({"type": "string", "minLength": 1})["pattern"].endswith("{1,}$")
    assert inner({"type": "string", "maxLength": 3})["pattern"].endswith("{0,3}$")
    assert inner({"type": "string", "enum": ["x", 1]}) == {"enum": ["x"]}
    assert inner({"const": None}) == {"enum": [None]}
    assert inner({"type": ["boolean", "null"]}) == {"anyOf": [{"type": "boolean"}, {"type": "null"}]}
    assert inner({"type": "array", "items": {"type": "null"}, "maxItems": 2}) == {
        "type": "array",
        "items": {"type": "null"},
        "maxItems": 2,
    }
    numbers = {
        (): (-NUMBER_MAX, NUMBER_MAX),
        (("minimum", 0.5), ("maximum", 2.5)): (1, 2),
        (("exclusiveMinimum", 1), ("exclusiveMaximum", 4)): (2, 3),
        (("exclusiveMinimum", 0.5), ("exclusiveMaximum", 2.5)): (1, 2),
        (("minimum", -2.5), ("maximum", -0.5)): (-2, -1),
    }
    for given, bounds in numbers.items():
        found = inner({"type": "integer", **dict(given)})
        assert (found["minimum"], found["maximum"]) == bounds, given
    assert inner({"type": "number", "exclusiveMinimum": 0}) == {
        "type": "number",
        "exclusiveMinimum": 0,
        "maximum": NUMBER_MAX,
    }
    defined = {"$defs": {"B": {"type": "boolean"}}}
    assert inner({"$ref": "#/$defs/B"}, **defined) == {"$ref": "#/$defs/B"}
    assert closed(of({"$ref": "#/$defs/B"}, **defined), "t")["$defs"] == {"B": {"type": "boolean"}}


LOOP = {"A": {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}}}
DEEP: dict[str, Any] = {"type": "null"}
for _ in range(60):
    DEEP = of(DEEP)


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (True, "does not say what it may hold"),
        ({}, "does not say what it may hold"),
        ({"type": "any"}, "is of type 'any'"),
        ({"type": 7}, "is of type '7'"),
        ({"type": "object"}, "does not name its properties"),
        ({"type": "object", "additionalProperties": {"type": "string"}}, "does not name its properties"),
        ({"type": "object", "properties": {}, "required": ["b"]}, "requires what is not among"),
        ({"type": "object", "properties": {}, "minProperties": 1}, "has 'minProperties'"),
        ({"type": "object", "properties": {}, "anyOf": []}, "has 'properties'"),
        ({"type": "array"}, "an item of property 'a' does not say"),
        ({"type": "array", "items": {"type": "null"}, "uniqueItems": True}, "has 'uniqueItems'"),
        ({"type": "array", "items": {"type": "null"}, "minItems": -1}, "a bound of '-1'"),
        ({"type": "number", "multipleOf": 2}, "has 'multipleOf'"),
        ({"type": "number", "minimum": 1e300}, "a minimum of '1e[+]300'"),
        ({"type": "number", "minimum": True}, "a minimum of 'True'"),
        ({"type": "number", "minimum": 1, "exclusiveMinimum": 1}, "an? exclusiveMinimum of"),
        ({"type": "string", "pattern": "a", "maxLength": 1}, "has the pattern 'a'"),
        ({"type": "string", "pattern": 'a"'}, "has the pattern"),
        ({"type": "string", "pattern": "a\\n"}, "has the pattern"),
        ({"type": "string", "pattern": "a(?=b)"}, "has the pattern"),
        ({"type": "string", "pattern": "a^b"}, "has the pattern"),
        ({"type": "string", "pattern": "a$b"}, "has the pattern"),
        ({"type": "string", "pattern": "[ -é]"}, "has the pattern"),
        ({"type": "string", "pattern": "(a"}, "has the pattern"),
        ({"type": "string", "pattern": 7}, "has the pattern"),
        ({"type": "string", "maxLength": 1.5}, "a bound of '1.5'"),
        ({"enum": []}, "no value"),
        ({"enum": "ab"}, "no value"),
        ({"enum": ["a"], "maxLength": 1}, "has 'maxLength'"),
        ({"type": "integer", "const": "a"}, "no value"),
        ({"enum": ["\\ud800"]}, "half of a character"),
        ({"oneOf": [{"type": "null"}]}, "does not say|has 'oneOf'"),
        ({"anyOf": "x"}, "anyOf that is no list"),
        ({"$ref": "#/$defs/B"}, "refers to"),
        ({"$ref": "https://x.y/z"}, "refers to"),
        ({"$ref": "#/$defs/A"}, "holds itself, by 'A'"),
        (DEEP, "nested more than"),
    ],
)
def test_what_no_grammar_keeps_to_is_refused_by_name(schema: Any, says: str) -> None:
    with pytest.raises(InputError, match=f"tool 't': a call of it cannot be forced: of its parameters, .*(?:{says})"):
        inner(schema, **{"$defs": LOOP})


def test_a_name_that_would_not_be_read_back_is_refused() -> None:
    prompt = ""
    for family, name in (("qwen3", 'a"b'), ("gpt-oss", "a b"), ("deepseek-r1", "a\nb")):
        with pytest.raises(InputError, match="cannot write the name"):
            chat_template(family).tag(REQUIRED, check_tools([tool(name)]), prompt=prompt)
    many = [tool(f"t{number}", of({"enum": ["x" * 900]})) for number in range(99)]
    with pytest.raises(InputError, match="more than 64 KiB"):
        chat_template("qwen3").tag(REQUIRED, check_tools(many), prompt=prompt)


def test_a_choice_needs_no_grammar_where_every_answer_keeps_to_it() -> None:
    single, tools = ToolChoice(is_single=True), check_tools([tool("t")])
    assert chat_template("llama-3").tag(single, tools, prompt="") == ""
    assert chat_template("qwen3").tag(FREE, tools, prompt="") == ""
    assert chat_template("gemma").tag(single, [], prompt="") == ""
    with pytest.raises(InputError, match="gemma: how it writes calls is not known"):
        chat_template("gemma").tag(REQUIRED, tools, prompt="")


def test_a_choice_that_no_answer_can_keep_to_is_refused() -> None:
    tools = check_tools([tool("t")])
    for name in ("u", "tt"):
        with pytest.raises(InputError, match=f"names '{name}', which is not among the tools"):
            chat_template("qwen3").tag(ToolChoice(is_forced=True, name=name), tools, prompt="")
    assert chat_template("qwen3").tag(ToolChoice(is_forced=True, name="t"), tools, prompt="")
    with pytest.raises(InputError, match="takes no bound on calls that are not forced"):
        chat_template("gpt-oss").tag(ToolChoice(is_single=True), tools, prompt="")


def test_a_choice_is_read_as_chat_completions_have_it() -> None:
    named = {"type": "function", "function": {"name": "t"}}
    assert read_choice("auto") == FREE and read_choice("required") == REQUIRED
    assert read_choice(named) == ToolChoice(is_forced=True, name="t")
    wrong: list[Any] = ["none", "", 7, {}, {"type": "function"}, {**named, "x": 1}, {**named, "function": {"name": ""}}]
    assert [read_choice(each) for each in wrong] == [None] * len(wrong)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("gemma", "glm-4.5")])
@pytest.mark.parametrize("text", ["</tool_call>", "<tool_call>", "</think>", "[TOOL_CALLS]", "<|end|>", "{", '"}'])
def test_a_call_that_quotes_marks_is_read_as_it_was_written(family: str, text: str) -> None:
    quoted = f"a {text} <｜tool▁call▁end｜> <|message|> <|start|>assistant b"
    call = {"id": "abcdefgh1", "function": {"name": "look", "arguments": json.dumps({"at": quoted})}}
    message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
    written, _ = FAMILIES[family].write(message)
    written = written.split("</think>\n\n", 1)[-1]  # reasoning that the prompt has closed
    _, content, calls = chat_template(family).read(written, prompt="", tools=check_tools([tool("look")]))
    assert [json.loads(each.arguments) for each in calls] == [{"at": quoted}] and not content
