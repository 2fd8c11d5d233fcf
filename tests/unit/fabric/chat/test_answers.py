"""Are answers read as their families write them, and is nothing lost where they are not?"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfab.fabric.chat.answers import call_id, finish_of, to_message
from rollfab.fabric.chat.forms import FORMS, Call, find_form, find_think_tags, read_answer
from rollfab.fabric.chat.template import ChatTemplate
from tests.unit.fabric.chat.families import FAMILIES, Message, build_tokenizer, chat_template
from tests.unit.fabric.chat.world import TOOLS

ARGUMENTS = {"place": 'Rome "old"\n日本', "days": 2, "deep": {"a": [1, None, True]}}
CALL = {"id": "abcdefghi", "function": {"name": "look", "arguments": json.dumps(ARGUMENTS)}}
OTHER = {"id": "ihgfedcba", "function": {"name": "walk", "arguments": '{"place": "7"}'}}
FORM_OF = {
    "qwen2.5": "hermes",
    "qwen3": "hermes",
    "qwen3-thinking": "hermes",
    "llama-3": "llama",
    "mistral": "mistral",
    "gemma": "gemma",
    "deepseek-r1": "deepseek",
    "deepseek-distilled": "deepseek",
    "glm-4.5": "glm",
    "gpt-oss": "gpt-oss",
}
PROMPT = {"deepseek-r1": "<think>\n", "qwen3-thinking": "<|im_start|>assistant\n<think>\n"}


def read(name: str, text: str) -> Message:
    """The message of an answer's text, with what its prompt ends in."""
    return to_message(chat_template(name).read(text, prompt=PROMPT.get(name, "x"), tools=TOOLS), "seed")


def calls_of(message: Message) -> list[tuple[str, Any]]:
    found = [each["function"] for each in message.get("tool_calls", [])]
    return [(each["name"], json.loads(each["arguments"])) for each in found]


@pytest.mark.parametrize(("name", "form"), FORM_OF.items())
def test_a_family_is_known_by_its_template(name: str, form: str) -> None:
    assert chat_template(name).form.name == form


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("calls", [[], [CALL], [CALL, OTHER]])
@pytest.mark.parametrize("content", ["", "Hello.\n\nIt is {hot}."])
@pytest.mark.parametrize("reasoning", ["", "First this,\nthen that."])
def test_an_answer_is_read_as_its_family_writes_it(
    name: str, calls: list[Message], content: str, reasoning: str
) -> None:
    family = FAMILIES[name]
    calls = calls[: family.call_count_max]
    if calls and name in ("llama-3", "mistral", "gpt-oss"):
        content = ""  # these write either
    reasoning = reasoning if family.has_reasoning else ""
    said = {"content": content, "reasoning_content": reasoning, "tool_calls": calls}

    message = read(name, family.write({"role": "assistant", **said})[0])

    assert message.get("content", "") == content
    assert message.get("reasoning_content", "") == reasoning
    expected = [(each["function"]["name"], json.loads(each["function"]["arguments"])) for each in calls]
    assert calls_of(message) == expected
    assert finish_of(message, "stop") == ("tool_calls" if calls else "stop")
    assert finish_of(message, "length") == "length"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama-3", '<|python_tag|>{"name": "look", "parameters": {"place": "Rome"}}'),
        ("llama-3", '{"type": "function", "name": "look", "arguments": {"place": "Rome"}}'),
        ("llama-3", '<|python_tag|>look.call(place="Rome")'),
        ("mistral", '[TOOL_CALLS]look[ARGS]{"place": "Rome"}'),
        ("mistral", '[TOOL_CALLS]look[CALL_ID]abcdefghi[ARGS]{"place": "Rome"}'),
        ("mistral", '[TOOL_CALLS][{"name": "look", "arguments": {"place": "Rome"}}]'),
        ("deepseek-r1", '</think><｜tool▁call▁begin｜>look<｜tool▁sep｜>{"place": "Rome"}<｜tool▁call▁end｜>'),
        ("glm-4.5", "<tool_call>look<arg_key>place</arg_key><arg_value>Rome</arg_value></tool_call>"),
        (
            "gpt-oss",
            '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"place": "Rome"}',
        ),
        ("qwen2.5", '<tool_call>{"arguments": {"place": "Rome"}, "name": "look"}</tool_call>\n'),
    ],
)
def test_other_ways_to_write_a_call_are_read_too(name: str, text: str) -> None:
    message = read(name, text)

    assert calls_of(message) == [("look", {"place": "Rome"})]
    assert "content" not in message


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen2.5", 'See:\n<tool_call>\n{"name": "look", "arguments": {"a": 1}\n</tool_call>'),
        ("qwen2.5", '<tool_call>{"name": "look", "arguments": {}}</tool_call><tool_call>{"name": "look"}</tool_call>'),
        ("qwen2.5", '<tool_call>{"name": "look", "arguments": {}}</tool_call> and <tool_call>{"na'),
        ("qwen2.5", '<tool_call>{"name": "look", "arguments": {"a": NaN}}</tool_call>'),
        ("qwen2.5", '<tool_call>{"name": 7, "arguments": {}}</tool_call>'),
        ("qwen2.5", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("qwen2.5", f'<tool_call>{{"name": "{"n" * 2000}", "arguments": {{}}}}</tool_call>'),
        ("qwen2.5", '<tool_call>{"name": "look", "arguments": {}, "why": "word"}</tool_call>'),
        ("qwen2.5", '<tool_call>{"name": "look", "arguments": {"a": 1, "a": 2}}</tool_call>'),
        ("qwen2.5", '<tool_call>{"name": "look", "arguments": {"a": 1e999}}</tool_call>'),
        ("qwen2.5", '<tool_call>{"name": "look", "arguments": {"a": "\\ud800"}}</tool_call>'),
        ("qwen2.5", f'<tool_call>{{"name": "look", "arguments": {"[" * 100_000}</tool_call>'),
        ("llama-3", '{"name": "look"} {"name": "walk"}'),
        ("llama-3", '{"answer": 42}'),
        ("llama-3", "<|python_tag|>print(1)"),
        ("mistral", "[TOOL_CALLS] [1, 2]"),
        ("mistral", '[TOOL_CALLS] [{"name": "look"}'),
        ("mistral", "[TOOL_CALLS]look[ARGS]{"),
        ("mistral", "[TOOL_CALLS] []"),
        ("gemma", "<tool_call>{}</tool_call>"),
        (
            "deepseek-distilled",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{\n```",
        ),
        ("glm-4.5", "<tool_call>look\n<arg_key>place</arg_key>\n<arg_value>Rome</tool_call>"),
        ("glm-4.5", "<tool_call>two words</tool_call>"),
        ("gpt-oss", "no channel at all"),
        ("gpt-oss", "<|channel|>commentary to=functions.look<|message|>{not json"),
        ("gpt-oss", "<|channel|>final<|message|>one<|end|>two"),
    ],
)
def test_a_malformed_call_is_content_to_the_letter(name: str, text: str) -> None:
    assert read(name, text) == {"role": "assistant", "content": text}


FRAGMENTS = (
    '<tool_call> </tool_call> <think> </think> {"name":"look","arguments":{"a":1}} {"name" [TOOL_CALLS] [ARGS] look '
    "<｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> <｜tool▁sep｜> <｜tool▁call▁end｜> <arg_key> </arg_key> <arg_value> "
    "</arg_value> <|channel|> final analysis commentary <|message|> <|end|> <|start|>assistant to=functions.look "
    "<|python_tag|> word"
).split()


@given(
    name=st.sampled_from(list(FAMILIES)), parts=st.lists(st.sampled_from([*FRAGMENTS, "\n", " ", "字"]), max_size=12)
)
def test_no_answer_is_an_error_and_no_word_is_lost(name: str, parts: list[str]) -> None:
    """Words of the policy are in the content, the reasoning, or the calls, whatever it wrote around them."""
    text = "".join(parts)

    message = read(name, text)

    kept = json.dumps(message, ensure_ascii=False)
    assert set(message) <= {"role", "content", "reasoning_content", "tool_calls"}
    assert kept.count("word") == text.count("word")
    assert kept.count("字") == text.count("字")


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("word", ["<tool_call>", "{", "<arg_key>", "[TOOL_CALLS]", "<｜tool▁call▁begin｜>", "a.call("])
def test_a_policy_that_repeats_itself_is_read_in_time(name: str, word: str) -> None:
    """A reader that goes back for each of a hundred thousand words would run into the time limit of all tests."""
    message = read(name, f"</think><|python_tag|>{word * 100_000}")

    assert message["content"].endswith(word * 100_000)


def test_ids_of_calls_follow_from_the_seed_unless_the_policy_wrote_fit_ones() -> None:
    text = FAMILIES["mistral"].write({"role": "assistant", "tool_calls": [CALL, OTHER]})[0]
    reading = chat_template("mistral").read(text, prompt="", tools=TOOLS)
    twice = chat_template("mistral").read(text.replace("ihgfedcba", "abcdefghi"), prompt="", tools=TOOLS)
    long = chat_template("mistral").read(text.replace("ihgfedcba", "long-id-by-policy"), prompt="", tools=TOOLS)

    assert [call["id"] for call in to_message(reading, "seed")["tool_calls"]] == ["abcdefghi", "ihgfedcba"]
    derived = [call_id("seed", 0), call_id("seed", 1)]
    assert [call["id"] for call in to_message(twice, "seed")["tool_calls"]] == derived
    assert [call["id"] for call in to_message(long, "seed")["tool_calls"]] == ["abcdefghi", derived[1]]
    assert len({*derived, call_id("other", 0)}) == 3
    assert all(len(each) == 9 and each.isalnum() for each in derived)


def test_ids_of_many_calls_are_not_compared_each_with_each() -> None:
    class Name(str):
        compared = 0

        def __eq__(self, other: object) -> bool:
            Name.compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    names = [Name(f"{index:09}") for index in range(1_000)]
    message = to_message(("", "", [Call("look", "{}", name) for name in names]), "seed")
    assert [call["id"] for call in message["tool_calls"]] == names
    assert Name.compared < 10 * len(names)


def test_reasoning_that_is_cut_or_was_opened_by_the_prompt_is_reasoning() -> None:
    assert read("qwen3", "<think>\nhmm") == {"role": "assistant", "reasoning_content": "hmm"}
    assert read("deepseek-r1", "hmm") == {"role": "assistant", "reasoning_content": "hmm"}
    assert read("qwen3", "hmm</think>yes") == {"role": "assistant", "reasoning_content": "hmm", "content": "yes"}
    assert read("qwen2.5", "<think>hmm</think>yes") == {"role": "assistant", "content": "<think>hmm</think>yes"}


def test_a_commentary_beside_reasoning_and_a_call_is_kept_as_reasoning() -> None:
    parts = ["<|channel|>analysis<|message|>hmm<|end|>", "<|channel|>commentary<|message|>I look.<|end|>"]
    call = "<|channel|>commentary to=functions.look<|message|>{}"

    message = read("gpt-oss", "<|start|>assistant".join([*parts, call]))

    assert message["reasoning_content"] == "hmm\nI look."
    assert calls_of(message) == [("look", {})]
    assert read("gpt-oss", "<|start|>assistant".join([parts[1], call]))["content"] == "I look."


SHIPPED = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "content": {},
        "thinking": {"open": "<why>", "close": "</why>"},
        "tool_calls": {
            "open": "<do>",
            "close": "</do>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.with}"}},
        },
    },
}


def test_a_response_template_of_the_tokenizers_own_reads_what_no_family_does() -> None:
    tokenizer = build_tokenizer(FAMILIES["qwen2.5"])
    tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    tokenizer.response_template = SHIPPED
    template = ChatTemplate(tokenizer)

    def read_shipped(text: str) -> Message:
        return to_message(template.read(text, prompt="<|im_start|>assistant\n", tools=TOOLS), "seed")

    both = read_shipped('<why>hmm</why>before <do>{"name": "look", "with": {"days": "2"}}</do> after')
    malformed = "yes <do>{</do>"

    assert both["reasoning_content"] == "hmm"
    assert both["content"].split() == ["before", "after"]
    assert calls_of(both) == [("look", {"days": 2})]
    assert read_shipped(malformed) == {"role": "assistant", "content": malformed}
    assert read_shipped("") == {"role": "assistant"}


def test_every_template_has_a_form_and_the_plain_one_reads_nothing() -> None:
    assert find_form("{{ messages }}").name == FORMS[-1].name == "plain"
    assert find_think_tags("[THINK] [/THINK]") == ("[THINK]", "[/THINK]")
    assert read_answer(FORMS[-1], "<tool_call>", {}, None, is_open=False) == ("", "<tool_call>", [])
