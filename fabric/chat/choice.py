"""Which tools an answer must call, and the grammar by which an engine keeps to that.

- The grammar is a structural tag, as xgrammar and vLLM read it. What it lets through, forms.py reads back as such
  calls; after it, any token that ends the turn may come.
- A mark may come as the token that the vocabulary has for it, and by its letters: xgrammar 0.2.8 can be told tokens by
  their ids, but takes one for another where it has seen two grammars that differ in nothing else. JSON texts may quote
  marks.
- A forced call may follow reasoning where the template knows any: it must where the prompt has opened it.
- What a form's grammar cannot promise is refused, never nearly kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..contract.errors import InputError
from ..contract.limits import GUIDED_BYTES_MAX
from ..contract.sampling import shown
from .forms import NAME, Call, Form, Writing, read_answer
from .messages import Tool
from .parameters import HALVES, closed

Format = dict[str, Any]  # of a structural tag
MARKS = re.compile(r"<\|\w+\|>")
GAP: Format = {"type": "regex", "pattern": "\\n{0,2}"}  # between reasoning and a call


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """What is asked of an answer's tool calls. is_forced: there is one. is_single: there are not two.

    name: of the tool that is called; empty: any of those that are offered.
    """

    is_forced: bool = False
    is_single: bool = False
    name: str = ""


FREE = ToolChoice()


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What a grammar must know of a model. text: of its chat template. tags: around reasoning, if it knows any."""

    name: str
    text: str
    form: Form
    tags: tuple[str, str] | None


def read_choice(value: Any) -> ToolChoice | None:
    """Read a tool_choice as chat completions have it; None: it is none. "none" is not: offer no tools for it."""
    if value in ("auto", "required"):
        return ToolChoice(is_forced=value == "required")
    function = value.get("function") if isinstance(value, Mapping) and value.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name or value != {"type": "function", "function": {"name": name}}:
        return None
    return ToolChoice(is_forced=True, name=name)


def check_choice(choice: ToolChoice, tools: Sequence[Tool]) -> ToolChoice:
    """Return a choice as these tools leave it. Raises InputError: it asks for a tool that is not offered."""
    if choice.name and choice.name not in [tool["function"]["name"] for tool in tools]:
        raise InputError(f"tool_choice names {shown(choice.name)}, which is not among the tools", name="tool_choice")
    if choice.is_forced and not tools:
        raise InputError("tool_choice asks for a call, and no tools are offered: offer some", name="tool_choice")
    return choice if tools else FREE


def tag_of(choice: ToolChoice, tools: Sequence[Tool], model: Model, prompt: str) -> str:
    """Write the structural tag of answers to a prompt that are as chosen; empty: all of the form's answers are.

    Raises:
        InputError: no grammar of this form, or of these tools, can promise it.
    """
    form = model.form
    writing = next((each for sign, each in form.writings if sign in model.text), None)
    if writing is None:
        raise _refused(f"the chat template of {model.name} is of the form {form.name}: {form.unforced}")
    if not choice.is_forced and writing.is_single:
        if writing.reasoning is None:
            return ""
        raise _refused(f"the form of {model.name}, {form.name}, takes no bound on calls that are not forced")
    chosen = [tool["function"] for tool in tools if choice.name in ("", tool["function"]["name"])]
    calls = _calls(writing, choice, [_call(writing, each, model) for each in chosen], model)
    if choice.is_forced:
        whole = _sequence(_reasoning(writing, model, prompt), calls)
    else:
        whole = _sequence({"type": "any_text", "excludes": list(form.opens)}, {"type": "optional", "content": calls})
    tag = json.dumps({"type": "structural_tag", "format": whole}, ensure_ascii=False)
    if len(tag.encode()) > GUIDED_BYTES_MAX:
        raise _refused(f"the grammar of these tools has more than {GUIDED_BYTES_MAX >> 10} KiB: offer fewer or one")
    return tag


def _calls(writing: Writing, choice: ToolChoice, each: list[Format], model: Model) -> Format:
    call = _one_of(each)
    found = [_one_of([_spelled(text) for text in writing.befores]), call]
    if not (choice.is_single or choice.name or writing.is_single):
        found.append({"type": "star", "content": _sequence(_spelled(writing.separator), call)})
    return _sequence(*found, _spelled(writing.after))


def _call(writing: Writing, function: Mapping[str, Any], model: Model) -> Format:
    name = function["name"]
    heads = [head for head in writing.heads if _reads_back(writing, head, name, model.form)]
    if not heads:
        raise _refused(f"{model.name} cannot write the name {shown(name)} in a call so that it is read back")
    schema = closed(function.get("parameters") or {}, f"tool {shown(name)}")
    ways = []
    for head in heads:
        arguments = {"type": "json_schema", "json_schema": schema, "excludes": list(HALVES)}
        ways.append(_sequence(_spelled(head.replace(NAME, name)), arguments, _spelled(writing.tail)))
    return _one_of(ways)


def _reads_back(writing: Writing, head: str, name: str, form: Form) -> bool:
    text = f"{writing.befores[0]}{head.replace(NAME, name)}{{}}{writing.tail}{writing.after}"
    return read_answer(form, text, {}, None, is_open=False) == ("", "", [Call(name, "{}")])


def _reasoning(writing: Writing, model: Model, prompt: str) -> Format:
    """Write what may stand before a call: reasoning, which must where the prompt has opened it."""
    if writing.reasoning is not None:
        opening, closing = writing.reasoning
        excludes, gap, is_open = MARKS.findall(opening + closing), _spelled(""), False
    elif model.tags is None or prompt.rstrip().endswith(model.tags[1]):
        return _spelled("")
    else:
        opening, closing = model.tags
        excludes, gap, is_open = [closing], GAP, prompt.rstrip().endswith(opening)
    block = [{"type": "any_text", "excludes": excludes}, _spelled(closing), gap]
    return _sequence(*block) if is_open else {"type": "optional", "content": _sequence(_spelled(opening), *block)}


def _spelled(text: str) -> Format:
    return {"type": "const_string", "value": text}


def _one_of(ways: list[Format]) -> Format:
    return ways[0] if len(ways) == 1 else {"type": "or", "elements": ways}


def _sequence(*elements: Format) -> Format:
    """Write one after the other, without those that are empty texts."""
    found = [each for each in elements if each != _spelled("")]
    return found[0] if len(found) == 1 else {"type": "sequence", "elements": found}


def _refused(why: str) -> InputError:
    return InputError(f"tool_choice: {why}", name="tool_choice")
