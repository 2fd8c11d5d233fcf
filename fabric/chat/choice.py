"""Which tools an answer must call, and the grammar by which an engine keeps to that.

- The grammar is a structural tag, as xgrammar and vLLM read it. What it lets through, forms.py reads back as such
  calls; after it, any token that ends the turn may come.
- A mark may come as the token that the vocabulary has for it, and by its letters: xgrammar 0.2.8 can be told tokens by
  their ids, but takes one for another where it has seen two grammars that differ in nothing else. JSON texts may quote
  marks.
- A forced call may follow reasoning where the template knows any: it must where the prompt has opened it.
- What a form's grammar cannot promise is refused, never nearly kept.
- Grammars leave out what they do not know without a word, so the keywords that may stand in a schema are a closed list.
- What comes out of a schema is narrower than what went in: objects have the properties that are named, in that order,
  numbers lie within NUMBER_MAX and have no exponent, bounded texts no escapes, and none holds half of a character.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..contract.errors import InputError
from ..contract.limits import GUIDED_BYTES_MAX
from ..contract.text import one_line, shown
from .forms import NAME, Call, Form, Writing, read_answer
from .messages import Tool

Format = dict[str, Any]  # of a structural tag
MARKS = re.compile(r"<\|\w+\|>")
GAP: Format = {"type": "regex", "pattern": "\\n{0,2}"}  # between reasoning and a call
NUMBER_MAX = 10**15  # of either sign; without a bound a grammar writes 1e999
HALVES = tuple(f"\\u{d}{digit}" for d in "dD" for digit in "89abcdefABCDEF")  # what texts must not hold, as JSON
# A character that stands in JSON as it is. A grammar's "." is also half of one, as bytes that are no UTF-8.
WHOLE = "[ !#-\\[\\]-\ud7ff\ue000-\U0010ffff]"
DEPTH_MAX = 24  # engines take 64 levels of objects and lists, and most of these are two
ANNOTATIONS = frozenset(
    "title description default examples deprecated readOnly writeOnly $schema $id $comment $defs definitions".split()
)
FORMATS = frozenset("date time date-time duration uuid ipv4 ipv6".split())  # others are annotations
BOUNDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
KEYWORDS: Mapping[str, frozenset[str]] = {
    "object": frozenset(("properties", "required", "additionalProperties")),
    "array": frozenset(("items", "minItems", "maxItems")),
    "string": frozenset(("minLength", "maxLength", "pattern", "format")),
    "integer": BOUNDS,
    "number": BOUNDS,
    "boolean": frozenset(),
    "null": frozenset(),
}
# Grammars look neither ahead nor for anchors inside, and write a pattern's quotes and line ends, or those in a range up
# to beyond ASCII, as they stand.
UNSAFE = re.compile(r'\(\?(?!:)|"|[\x00-\x1f]|\\[^dDsSwW.+*?()\[\]{}|^$/-]|(?<![\[\\])\^|(?<!\\)\$|-[^\x00-\x7f]')
Schema = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """What is asked of an answer's tool calls. is_forced: there is one. is_single: there are not two.

    name: of the tool that is called; empty: any of those that are offered.
    """

    is_forced: bool = False
    is_single: bool = False
    name: str = ""


FREE, ANY = ToolChoice(), ToolChoice(is_forced=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What a grammar must know of a model. text: of its chat template. tags: around reasoning, if it knows any."""

    name: str
    text: str
    form: Form
    tags: tuple[str, str] | None


def read_choice(value: Any) -> ToolChoice | None:
    """Read a tool_choice as chat completions have it; None: it is none. "none" is not: offer no tools for it."""
    if isinstance(value, str):
        return {"auto": FREE, "required": ANY}.get(value)
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


def closed(parameters: Mapping[str, Any], where: str) -> Schema:
    """Return the schema of a tool's parameters as a grammar keeps to it; without any, there are no arguments.

    Raises:
        InputError: says what in it no grammar keeps to.
    """
    if parameters.keys() <= ANNOTATIONS:
        parameters = {"type": "object", "properties": {}}
    return _Closing(parameters, where).whole()


class _Closing:
    def __init__(self, root: Mapping[str, Any], where: str) -> None:
        self._root, self._where = root, where
        self._defined: dict[str, Schema] = {}
        self._open: list[str] = []  # references that are being followed

    def whole(self) -> Schema:
        schema = self._any(self._root, "the whole", 0)
        if schema.get("type") != "object":
            raise self._refused("the whole", "is no object")
        return {**schema, "$defs": self._defined} if self._defined else schema

    def _any(self, schema: Any, at: str, depth: int) -> Schema:
        if not isinstance(schema, Mapping):
            raise self._refused(at, "does not say what it may hold")
        if depth > DEPTH_MAX:
            raise self._refused(at, f"is nested more than {DEPTH_MAX} deep")
        stated = {key: value for key, value in schema.items() if key not in ANNOTATIONS}
        for key, read in (("$ref", self._reference), ("anyOf", self._one_of)):
            if key in stated:
                self._alone(stated, {key}, at)
                return read(stated[key], at, depth)
        kinds = stated.get("type", [])
        kinds = kinds if isinstance(kinds, list) else [kinds]
        for kind in kinds:
            if not isinstance(kind, str) or kind not in KEYWORDS:
                raise self._refused(at, f"is of type {_shown(kind)}")
        for key in ("enum", "const"):
            if key in stated:
                self._alone(stated, {key, "type"}, at)
                return self._values(stated[key] if key == "enum" else [stated[key]], kinds, at)
        if not kinds:
            raise self._refused(at, "does not say what it may hold")
        self._alone(stated, {"type"}.union(*(KEYWORDS[kind] for kind in kinds)), at)
        ways = [self._typed(kind, stated, at, depth) for kind in kinds]
        return ways[0] if len(ways) == 1 else {"anyOf": ways}

    def _alone(self, stated: Schema, allowed: set[str], at: str) -> None:
        """Refuse keywords to which a grammar would not keep there."""
        more = sorted(stated.keys() - allowed)
        if more:
            raise self._refused(at, f"has {_shown(more[0])} where no grammar keeps to it")

    def _reference(self, name: Any, at: str, depth: int) -> Schema:
        place, _, key = str(name).rpartition("/")
        defined = self._root.get(place[2:]) if place in ("#/$defs", "#/definitions") else None
        if not isinstance(defined, Mapping) or key not in defined or {"$defs", "definitions"} <= self._root.keys():
            raise self._refused(at, f"refers to {_shown(name)}, which is not in the schema's $defs")
        if key in self._open:
            raise self._refused(at, f"holds itself, by {_shown(key)}")
        if key not in self._defined:
            self._open.append(key)
            self._defined[key] = self._any(defined[key], _shown(key), depth + 1)
            self._open.pop()
        return {"$ref": f"#/$defs/{key}"}

    def _one_of(self, ways: Any, at: str, depth: int) -> Schema:
        if not isinstance(ways, list) or not ways:
            raise self._refused(at, "has an anyOf that is no list")
        return {"anyOf": [self._any(each, at, depth + 1) for each in ways]}

    def _values(self, values: Any, kinds: list[str], at: str) -> Schema:
        fit = [each for each in values if not kinds or _kinds_of(each) & set(kinds)] if isinstance(values, list) else []
        if not fit:
            raise self._refused(at, "has no value that it may hold")
        self._spelled(fit, at)
        return {"enum": fit}

    def _typed(self, kind: str, stated: Schema, at: str, depth: int) -> Schema:
        if kind == "object":
            return self._object(stated, at, depth)
        if kind == "array":
            counts: Schema = {key: self._count(stated[key], at) for key in ("minItems", "maxItems") if key in stated}
            return {"type": kind, "items": self._any(stated.get("items"), f"an item of {at}", depth + 1), **counts}
        if kind == "string":
            return self._text(stated, at)
        return {"type": kind, **(self._bounds(kind, stated, at) if KEYWORDS[kind] is BOUNDS else {})}

    def _object(self, stated: Schema, at: str, depth: int) -> Schema:
        properties, required = stated.get("properties"), stated.get("required", [])
        if properties is None and stated.get("additionalProperties") is False:
            properties = {}
        if not isinstance(properties, Mapping):
            raise self._refused(at, "is an object that does not name its properties")
        if not isinstance(required, list) or not set(map(str, required)) <= properties.keys():
            raise self._refused(at, "requires what is not among its properties")
        self._spelled(list(properties), at)
        inner = {name: self._any(each, f"property {_shown(name)}", depth + 1) for name, each in properties.items()}
        return {"type": "object", "properties": inner, "required": required, "additionalProperties": False}

    def _text(self, stated: Schema, at: str) -> Schema:
        bounds = [self._count(stated[key], at) if key in stated else None for key in ("minLength", "maxLength")]
        form, pattern = stated.get("format"), stated.get("pattern")
        is_bounded = bounds != [None, None]
        if pattern is not None:
            if is_bounded or not _is_plain(pattern):
                raise self._refused(at, f"has the pattern {_shown(pattern)} where no grammar keeps to it")
            return {"type": "string", "pattern": pattern}
        if is_bounded:  # as a pattern: exclusions would make a grammar forget the lengths
            least, most = bounds
            return {"type": "string", "pattern": f"^{WHOLE}{{{least or 0},{'' if most is None else most}}}$"}
        return {"type": "string", **({"format": form} if form in FORMATS else {})}

    def _bounds(self, kind: str, stated: Schema, at: str) -> Schema:
        found: Schema = {}
        for name, other, sign in (("minimum", "exclusiveMinimum", -1), ("maximum", "exclusiveMaximum", 1)):
            key = other if other in stated else name
            value = stated.get(key, sign * NUMBER_MAX)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if {name, other} <= stated.keys() or not is_number or not abs(value) <= NUMBER_MAX:
                raise self._refused(at, f"has a {key} of {_shown(value)} where no grammar keeps to it")
            if kind == "integer":
                whole = math.ceil(-sign * value) * -sign  # towards what is allowed
                key, value = name, whole - sign if key == other and whole == value else whole
            found[key] = value
        return found

    def _count(self, value: Any, at: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self._refused(at, f"has a bound of {_shown(value)}")
        return value

    def _spelled(self, values: list[Any], at: str) -> None:
        """Refuse values that a grammar without halves of characters would leave out."""
        text = json.dumps(values, ensure_ascii=False)
        if any(half in text for half in HALVES):
            raise self._refused(at, "has a name or value with what looks like half of a character")

    def _refused(self, at: str, what: str) -> InputError:
        text = f"{self._where}: a call of it cannot be forced: of its parameters, {at} {what}"
        return InputError(text, name="tool_choice")


def _is_plain(pattern: Any) -> bool:
    """Whether a grammar reads a pattern as everybody does, from its first character to its last."""
    try:
        re.compile(pattern)
    except (re.error, TypeError, OverflowError, RecursionError):
        return False
    return not UNSAFE.search(pattern.removeprefix("^").removesuffix("$"))


def _kinds_of(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number", "integer"} if value.is_integer() else {"number"}
    names = {str: "string", list: "array", dict: "object", type(None): "null"}
    return {names[type(value)]}


def _shown(value: Any) -> str:
    return repr(one_line(str(value))[:60])
