"""How families of models write an answer: reasoning, tool calls, and the tokens that end it, as one table.

- A family is known by its chat template's own text (`find_form`), since a model's name says nothing about its template.
- A reader of tool calls takes a text and gives what is left of it and the calls; where one call is malformed it gives
  the whole text and none, so that no text is ever lost and the environment can say what was wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .messages import NAME_BYTES_MAX, read_object

DECODER = json.JSONDecoder()
NAME = "{name}"  # stands for a tool's in a head


class Call(NamedTuple):
    """A tool call as it was read. arguments: a JSON object as text. id: where the policy wrote one itself."""

    name: str
    arguments: str
    id: str | None = None


Schemas = Mapping[str, Mapping[str, Any]]  # a tool's name → its parameters' schemas, by their names
Reading = tuple[str, str, list[Call]]  # reasoning, content, calls
Reader = Callable[[str, Schemas], tuple[str, list[Call]] | None]  # None: some call is malformed


@dataclass(frozen=True)
class Writing:
    """How a family's policy writes calls, for grammars (choice.py): one of befores, calls and separators, after.

    A call is one of the heads, with the tool's name in NAME's place, its arguments as JSON, and the tail. reasoning:
    the texts around it, where the form has it without tags. is_single: an answer holds at most one call anyway.
    """

    heads: tuple[str, ...]
    tail: str
    befores: tuple[str, ...] = ("",)
    after: str = ""
    separator: str = ""
    reasoning: tuple[str, str] | None = None
    is_single: bool = False


@dataclass(frozen=True)
class Form:
    """How one family writes. Names stand for tokens where the vocabulary has them.

    signs: texts of which a template has at least one. ends: tokens that end an answer, beside the model's own eos.
    opens: texts without which there is no tool call. marks: texts that say nothing themselves, removed once all calls
    could be read. writes: tokens that an answer may hold, and that are left alone in an assistant's own messages.
    writings: of calls, the first whose sign the template has; without any, no call can be forced, which unforced says.
    """

    name: str
    signs: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    opens: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    read_calls: Reader = lambda text, schemas: (text, [])
    read_whole: Callable[[str], Reading | None] | None = None
    writings: tuple[tuple[str, Writing], ...] = ()
    unforced: str = "how it writes calls is not known"


def find_form(template_text: str) -> Form:
    """Find the first form of which the template has a sign; the last one, plain, has none and fits every template."""
    return next(form for form in FORMS if not form.signs or any(sign in template_text for sign in form.signs))


def find_think_tags(template_text: str) -> tuple[str, str] | None:
    """Find the texts around reasoning, where the template knows any; other models' <think> is content like all else."""
    return next((tags for tags in THINK_TAGS if tags[1] in template_text), None)


def split_reasoning(text: str, tags: tuple[str, str], *, is_open: bool, opens: Sequence[str] = ()) -> tuple[str, str]:
    """Split an answer into reasoning and the rest. is_open: the prompt has opened the reasoning already.

    Text before a closing tag is reasoning even without an opening one, which is how templates read it, unless a call
    begins before it (one of `opens`) and may quote the tag; reasoning that was never closed is all the answer has.
    """
    before, closed, after = text.partition(tags[1])
    is_begun = is_open or text.lstrip().startswith(tags[0])
    if not is_begun and (not closed or any(sign in before for sign in opens)):
        return "", text
    return before.lstrip().removeprefix(tags[0]).strip(), after.lstrip()


def read_answer(form: Form, text: str, schemas: Schemas, tags: tuple[str, str] | None, *, is_open: bool) -> Reading:
    """Read reasoning, content and tool calls out of an answer's text. Never fails: malformed calls are content.

    Args:
        text: the answer without the token that ended it, special tokens as their texts.
        schemas: of the tools that were offered.
        tags: around reasoning, if the template knows any.
        is_open: the prompt ends with the opening tag.
    """
    if form.read_whole is not None:
        whole = form.read_whole(text)
        return ("", text, []) if whole is None or not _are_fit(whole[2]) else whole
    reasoning, rest = split_reasoning(text, tags, is_open=is_open, opens=form.opens) if tags else ("", text)
    read = form.read_calls(rest, schemas) if any(sign in rest for sign in form.opens) else (rest, [])
    if read is None or not read[1] or not _are_fit(read[1]):
        return reasoning, rest, []
    content, calls = read
    for mark in form.marks:
        content = content.replace(mark, "")
    return reasoning, content.strip(), calls


def _are_fit(calls: Sequence[Call]) -> bool:
    """Tell whether all names are such as messages may have: a client hands them back."""
    return all(0 < len(call.name.encode()) <= NAME_BYTES_MAX for call in calls)


def _json_call(text: str, arguments_keys: Sequence[str]) -> Call | None:
    """Read a call that is one JSON object with a name and arguments, and nothing that would be lost."""
    value = read_object(text)
    if value is None:
        return None
    key = next((each for each in arguments_keys if isinstance(value.get(each), dict)), None)
    name, identifier = value.get("name"), value.get("id")
    if key is None or not isinstance(name, str) or set(value) - {"name", "id", "type", key}:
        return None
    return Call(name, _text_of(value[key]), identifier if isinstance(identifier, str) else None)


def _text_of(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _value_end(text: str, start: int) -> int | None:
    """Find where the JSON value ends that begins at `start`; its texts may quote any mark. None: there is none."""
    try:
        return DECODER.raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return None


def _read_between(
    text: str, opening: str, closing: str, read: Callable[[str], Call | None], *, is_json: bool = True
) -> tuple[str, list[Call]] | None:
    """Read what stands outside all pairs of marks, and a call inside each; None: one is none, or never closed.

    is_json: a call holds a JSON object, which may quote the marks. In time that grows with the text alone, whatever a
    policy writes: no pattern that could be made to go back, and all ends with the first object that is none.
    """
    left, calls, place = [], [], 0
    while (start := text.find(opening, place)) >= 0:
        left.append(text[place:start])
        start += len(opening)
        end = text.find(closing, start)
        if is_json:
            brace = text.find("{", start, max(end, start))
            value_end = _value_end(text, brace) if brace >= 0 else None
            if value_end is None:
                return None
            end = text.find(closing, value_end)
        call = read(text[start:end]) if end >= 0 else None
        if call is None:
            return None
        calls.append(call)
        place = end + len(closing)
    return "".join([*left, text[place:]]), calls


def _read_hermes(text: str, schemas: Schemas) -> tuple[str, list[Call]] | None:
    return _read_between(text, "<tool_call>", "</tool_call>", lambda body: _json_call(body.strip(), ("arguments",)))


def _read_glm(text: str, schemas: Schemas) -> tuple[str, list[Call]] | None:
    def read(body: str) -> Call | None:
        name, *pairs = body.split("<arg_key>")
        name = name.strip()
        arguments = {}
        for pair in pairs:
            key, _, value = pair.partition("</arg_key>")
            value = value.strip()
            if not (value.startswith("<arg_value>") and value.endswith("</arg_value>")):
                return None
            text = value.removeprefix("<arg_value>").removesuffix("</arg_value>")
            arguments[key.strip()] = _typed(text, schemas.get(name, {}).get(key.strip()))
        is_whole = len(arguments) == len(pairs) and "<" not in name and len(name.split()) == 1
        return Call(name, _text_of(arguments)) if is_whole else None

    return _read_between(text, "<tool_call>", "</tool_call>", read, is_json=False)


def _typed(text: str, schema: Any) -> Any:
    """Read a value that was written without quotes: text where its schema says so or where it is no JSON."""
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return text
    wrapped = read_object(f'{{"value": {text}}}')
    return wrapped["value"] if wrapped is not None and len(wrapped) == 1 else text


PRESET_CALL = "<|preset_call|>"
PYTHON_TAG = "<|python_tag|>"
LLAMA_BUILT_IN = re.compile(r'([\w.-]+)\.call\(((?:[\w-]+="(?:[^"\\]|\\.)*"(?:,\s*)?)*)\)')
LLAMA_ARGUMENT = re.compile(r'([\w-]+)=("(?:[^"\\]|\\.)*")')


def _read_llama(text: str, schemas: Schemas) -> tuple[str, list[Call]] | None:
    """Read one JSON object, or a built-in tool's call; Llama-3 writes either as the whole answer."""
    body = text.strip().removeprefix(PYTHON_TAG).strip()
    call = _json_call(body, ("parameters", "arguments"))
    if call is not None:
        return "", [call]
    built_in = LLAMA_BUILT_IN.fullmatch(body)
    if built_in is None or not text.lstrip().startswith(PYTHON_TAG):
        return None
    pairs = [(key, read_object(f'{{"value": {value}}}')) for key, value in LLAMA_ARGUMENT.findall(built_in[2])]
    if any(value is None for _, value in pairs):
        return None
    return "", [Call(built_in[1], _text_of({key: value["value"] for key, value in pairs if value is not None}))]


MISTRAL_MARK = "[TOOL_CALLS]"
MISTRAL_NAMED = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\](\w+))?\[ARGS\]\s*(?={)")
SPACES = re.compile(r"\s*")


def _read_mistral(text: str, schemas: Schemas) -> tuple[str, list[Call]] | None:
    """Read a JSON list of calls after the mark, or calls as name[ARGS]{…} with a mark before each."""
    content, mark, _ = text.partition(MISTRAL_MARK)
    calls: list[Call | None] = []
    place = len(content)
    while text.startswith(MISTRAL_MARK, place):
        place += len(MISTRAL_MARK)
        named = MISTRAL_NAMED.match(text, place)
        start = _after_spaces(text, place) if named is None else named.end()
        end = _value_end(text, start)
        if end is None:
            return None
        if named is not None:
            value = read_object(text[start:end])
            calls.append(None if value is None else Call(named[1], _text_of(value), named[2]))
        else:
            listed = read_object(f'{{"calls": {text[start:end]}}}')
            values = listed["calls"] if listed is not None else None
            if not isinstance(values, list) or not values:
                return None
            calls += [_json_call(json.dumps(value), ("arguments",)) for value in values]
        place = _after_spaces(text, end)
    good = [call for call in calls if call is not None]
    return (content, good) if mark and len(good) == len(calls) and place == len(text) else None


def _after_spaces(text: str, place: int) -> int:
    found = SPACES.match(text, place)
    assert found is not None, "it may match nothing"
    return found.end()


DEEPSEEK_OPEN, DEEPSEEK_CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"


def _read_deepseek(text: str, schemas: Schemas) -> tuple[str, list[Call]] | None:
    """Read calls as name<sep>{…}, or as older templates write them: function<sep>name and a block of code."""

    def read(body: str) -> Call | None:
        name, _, rest = body.partition("<｜tool▁sep｜>")
        if name.strip() == "function":
            name, _, rest = rest.partition("\n")
            rest = rest.strip().removeprefix("```json").removesuffix("```")
        value = read_object(rest)
        return Call(name.strip(), _text_of(value)) if name.strip() and value is not None else None

    return _read_between(text, DEEPSEEK_OPEN, DEEPSEEK_CLOSE, read)


HARMONY_START, HARMONY_MESSAGE, HARMONY_END = "<|start|>assistant", "<|message|>", "<|end|>"
HARMONY_CHANNEL = re.compile(r"<\|channel\|>\s*(analysis|commentary|final)\b")
HARMONY_TOOL = re.compile(r"to=functions\.([\w.-]+)")


def _read_harmony(text: str) -> Reading | None:
    """Read the channels of an answer: analysis is reasoning, commentary to a function a call, the rest content."""
    reasoning: list[str] = []
    content: list[str] = []
    calls: list[Call] = []
    place = 0
    while place >= 0:
        start = text.find(HARMONY_MESSAGE, place)
        header = text[place : max(start, 0)]
        channel, tool = HARMONY_CHANNEL.search(header), HARMONY_TOOL.search(header)
        if channel is None or HARMONY_START in header:
            return None
        start += len(HARMONY_MESSAGE)
        value_end = start if tool is None else _value_end(text, _after_spaces(text, start))
        if value_end is None:
            return None
        after = text.find(HARMONY_START, value_end)
        body = text[start : after if after >= 0 else len(text)].removesuffix(HARMONY_END)
        place = after + len(HARMONY_START) if after >= 0 else -1
        if tool is not None:
            value = read_object(body)
            if value is None:
                return None
            calls.append(Call(tool[1], _text_of(value)))
        elif HARMONY_END in body or HARMONY_MESSAGE in body:
            return None
        else:
            (reasoning if channel[1] == "analysis" else content).append(body)
    if calls and reasoning:  # templates take only one of both beside a call
        reasoning, content = reasoning + content, []
    return "\n".join(reasoning), "\n".join(content), calls


def _read_preset(text: str, schemas: Schemas) -> tuple[str, list[Call]] | None:
    """Read calls of presets (workers/engines/model_tokenizer.py): a name, where several are offered, and arguments."""
    head, *pieces = text.split(PRESET_CALL)
    calls = []
    for piece in pieces:
        name, _, arguments = piece.strip().partition(" ")
        if not name and len(schemas) == 1:
            name = next(iter(schemas))
        value = read_object(arguments or "{}")
        if not name or value is None:
            return None
        calls.append(Call(name, _text_of(value)))
    return head, calls


HERMES_WRITING = Writing(
    heads=('<tool_call>\n{"name": "{name}", "arguments": ',), tail="}\n</tool_call>", separator="\n"
)
LLAMA_WRITING = Writing(heads=('{"name": "{name}", "parameters": ',), tail="}", is_single=True)
MISTRAL_LIST = Writing(
    heads=('{"name": "{name}", "arguments": ',),
    tail="}",
    befores=("[TOOL_CALLS] [", "[TOOL_CALLS]["),
    after="]",
    separator=", ",
)
MISTRAL_NAMES = Writing(heads=("[TOOL_CALLS]{name}[ARGS]",), tail="")
DEEPSEEK_BLOCKS = Writing(
    heads=(f"{DEEPSEEK_OPEN}function<｜tool▁sep｜>{NAME}\n```json\n",),
    tail=f"\n```{DEEPSEEK_CLOSE}",
    befores=("<｜tool▁calls▁begin｜>",),
    after="<｜tool▁calls▁end｜>",
    separator="\n",
)
DEEPSEEK_LINES = Writing(
    heads=(f"{DEEPSEEK_OPEN}{NAME}<｜tool▁sep｜>",),
    tail=DEEPSEEK_CLOSE,
    befores=("<｜tool▁calls▁begin｜>",),
    after="<｜tool▁calls▁end｜>",
)
HARMONY_WRITING = Writing(
    heads=(
        f"<|channel|>commentary to=functions.{NAME} <|constrain|>json<|message|>",
        f" to=functions.{NAME}<|channel|>commentary json<|message|>",
    ),
    tail="",
    reasoning=("<|channel|>analysis<|message|>", f"{HARMONY_END}{HARMONY_START}"),
    is_single=True,
)

THINK_TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
FORMS = (
    Form(
        "gpt-oss",
        signs=("<|channel|>",),
        ends=("<|return|>", "<|call|>", "<|endoftext|>"),
        read_whole=_read_harmony,
        writings=(("", HARMONY_WRITING),),
    ),
    Form(
        "deepseek",
        signs=("<｜tool▁calls▁begin｜>", "<｜Assistant｜>"),
        ends=("<｜end▁of▁sentence｜>",),
        opens=(DEEPSEEK_OPEN,),
        marks=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        writes=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", DEEPSEEK_OPEN, "<｜tool▁sep｜>", DEEPSEEK_CLOSE),
        read_calls=_read_deepseek,
        writings=(("```json", DEEPSEEK_BLOCKS), ("<｜tool▁sep｜>", DEEPSEEK_LINES)),
    ),
    Form(
        "glm",
        signs=("<arg_key>",),
        ends=("<|user|>", "<|observation|>", "<|endoftext|>"),
        opens=("<tool_call>",),
        writes=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        read_calls=_read_glm,
        unforced="it writes arguments without quotes, so that a text may read as a number",
    ),
    Form(
        "mistral",
        signs=("[TOOL_CALLS]", "[INST]"),
        ends=("</s>",),
        opens=(MISTRAL_MARK,),
        read_calls=_read_mistral,
        writings=(("[ARGS]", MISTRAL_NAMES), ("", MISTRAL_LIST)),
    ),
    Form(
        "llama",
        signs=(PYTHON_TAG, "<|start_header_id|>ipython", "<|start_header_id|>"),
        ends=("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
        opens=("{", PYTHON_TAG),
        read_calls=_read_llama,
        writings=(("", LLAMA_WRITING),),
    ),
    Form(
        "preset",
        signs=(PRESET_CALL,),
        opens=(PRESET_CALL,),
        writes=(PRESET_CALL,),
        read_calls=_read_preset,
        unforced="no engine makes grammars for presets",
    ),
    Form(
        "hermes",
        signs=("<tool_call>",),
        ends=("<|im_end|>", "<|endoftext|>"),
        opens=("<tool_call>",),
        writes=("<tool_call>", "</tool_call>"),
        read_calls=_read_hermes,
        writings=(("", HERMES_WRITING),),
    ),
    Form("gemma", signs=("<start_of_turn>",), ends=("<end_of_turn>", "<eos>")),
    Form("plain"),
)
