"""A model's chat template and tokenizer: messages to text, text to token ids, ids back to a message.

- A template is a program that came with the model. It runs in the library's sandbox and sees plain JSON alone; what it
  raises is an InputError with its own words.
- Text that only looks like a control token never becomes one. vLLM and the library's default let it. Refusing such
  texts would let any page end an episode, so they are encoded as plain text: `render` puts a mark inside them
  (control.py), and `encode` encodes what lies on its two sides apart. Newer versions of the library have the like
  (sanitize_control_tokens), but only from messages to ids; a conversation needs the text, to see what changed in it.
- Control tokens are a tokenizer's special ones, and added ones that the template writes itself. In an assistant's own
  messages those that an answer may hold are left alone, if they are not special: its <think> is what it wrote.
- A template that leaves messages of some role out without a word is asked once, and such messages are refused.
- For an image the template writes one token; `places` puts as many there as the image has pieces. An image that it
  leaves out is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..contract.errors import ConfigError, InputError, PayloadTooLarge, WireError
from ..contract.images import ImagePlace
from ..contract.limits import PROMPT_TOKENS_MAX
from ..contract.records import Int32
from ..contract.text import DAMAGED, one_line
from ..contract.wire import load_json
from .answers import read_text
from .choice import FREE, Model, ToolChoice, check_choice, tag_of
from .control import MARK, ControlTokens, without_marks
from .forms import Reading, find_form, find_think_tags
from .messages import Message, Tool
from .vision import Vision, find_vision

RESERVED = frozenset(
    "messages tools documents conversation chat_template add_generation_prompt continue_final_message tokenize padding "
    "truncation max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs "
    "sanitize_control_tokens".split()
)
PROBE_NAME, PROBE_VALUE, PROBE_TEXT = "probename", "probevalue", "probetext"
USER_PROBE: Message = {"role": "user", "content": "x"}
CALL_PROBE: Message = {
    "role": "assistant",
    "tool_calls": [
        {
            "type": "function",
            "id": "probe0000",
            "function": {"name": PROBE_NAME, "arguments": json.dumps({"key": PROBE_VALUE})},
        }
    ],
}


class ChatTemplate:
    """What a model's tokenizer knows about chat.

    tokenizer: of the transformers library, loaded. stop_ids: that end an answer, beside those found here. ends: those
    of them behind which a text can be encoded as it stands there, with their texts; others are ordinary tokens.
    vision: the model's eyes; None: it has none, or (blind) none that can be used here, and why.

    Raises:
        ConfigError: it has no chat template.
    """

    def __init__(
        self, tokenizer: Any, *, stop_ids: Iterable[int] = (), vision: Vision | None = None, blind: str = ""
    ) -> None:
        self._tokenizer = tokenizer
        self.name = str(getattr(tokenizer, "name_or_path", "") or "the model")
        self._vision = vision
        self._blind = blind or f"{self.name} takes no images: say it in words, or run a model that sees"
        template: str | Mapping[str, str] | None = getattr(tokenizer, "chat_template", None)
        if not template:
            raise ConfigError(
                f"{self.name} has no chat template: put chat_template.jinja beside its tokenizer (an instruction-tuned "
                "model of the same family has one), or let the environment speak in plain text",
                model=self.name,
            )
        self._text = template if isinstance(template, str) else "\n".join(template.values())
        self.form = find_form(self._text)
        self._tags = find_think_tags(self._text)
        self._added: dict[str, int] = dict(tokenizer.added_tokens_encoder)
        special, written = self._control_tokens()
        own = {*self.form.writes, *(self._tags or ())} - special
        self._special = ControlTokens(special)
        self._control = ControlTokens(special | written)
        self._spoken = ControlTokens((special | written) - own)
        self._newline = self._ids_of("\n")
        self._model = Model(name=self.name, text=self._text, form=self.form, tags=self._tags)
        self._shape_calls: Callable[[Message], Message] = self._find_shape()
        self._silent_roles = frozenset(role for role in ("system", "tool") if self._is_silent(role))
        ends = [self._added[name] for name in self.form.ends if name in self._added]
        eos = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        self.stop_ids: tuple[int, ...] = tuple(sorted({*eos, *ends, *stop_ids, *self._closing_ids()}))
        self.ends: dict[int, str] = {each: text for text, each in self._added.items() if self._is_end(each, text)}

    @classmethod
    def load(cls, directory: str) -> ChatTemplate:
        """Load the chat template of a model's directory, with its eyes and the ids that generation_config.json names.

        Raises:
            ConfigError: no tokenizer can be loaded from there, or it has no chat template.
        """
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{directory} has no tokenizer that can be loaded: {error}", model=directory) from error
        return cls.of(tokenizer, directory)

    @classmethod
    def of(cls, tokenizer: Any, model: str) -> ChatTemplate:
        """Make the chat template of a loaded tokenizer, with what lies beside it: see `load`."""
        vision, blind = None, ""
        try:
            vision = find_vision(model)
        except ConfigError as error:  # it may still read text
            blind = error.message
        return cls(tokenizer, stop_ids=named_ends(model), vision=vision, blind=blind)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        answer: bool,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Write the text of checked messages, with MARK inside what only looks like a control token.

        Args:
            answer: with the words that begin an answer.
            options: further variables of the template, such as enable_thinking.

        Raises:
            InputError: the template refuses them (its own words), takes no tools or messages of some role, or an
                option has a reserved name.
        """
        if tools and not re.search(r"\btools\b", self._text):
            raise InputError(f"the chat template of {self.name} takes no tools: say in a message what there is")
        taken = RESERVED & set(options or ())
        if taken:
            raise InputError(f"{min(taken)!r} is no option of a chat template: it is set by the call itself")
        shown = [self._marked(each) for each in messages]
        silent = next((index for index, each in enumerate(shown) if each["role"] in self._silent_roles), None)
        if silent is not None:
            raise InputError(
                f"message {silent}: the chat template of {self.name} leaves messages of role "
                f"{messages[silent]['role']} out: say it in a user's message"
            )
        offered = self._control.broken_up(list(tools)) or None
        chosen = self._control.broken_up(dict(options or {}))
        return self._apply(shown, offered, answer, chosen)

    def encode(self, text: str, *, after: str = "") -> Int32:
        """Return ids of rendered text, int32 (T,). Control tokens become their ids, unless a mark stands in them.

        Args:
            after: the text of one of `ends`, which stands before `text` and has its id already: the first ids are
                those that the text has there, not those at the start of a text.

        Raises:
            PayloadTooLarge: a text with marks has more tokens than any prompt; the rest of it is not encoded.
        """
        first, *others = text.split(MARK)
        ids = self._ids_of(after + first)[1 if after else 0 :]
        for piece in others:
            ids += self._ids_inside(piece)
            if len(ids) > PROMPT_TOKENS_MAX:
                raise PayloadTooLarge(
                    f"the messages have more than {PROMPT_TOKENS_MAX:,} tokens, the limit: send less",
                    size_bytes=4 * len(ids),
                    limit_bytes=4 * PROMPT_TOKENS_MAX,
                )
        return np.asarray(ids, dtype=np.int32)

    def check_sees(self, files: Iterable[bytes]) -> None:
        """Require that the model takes these images. Raises InputError: one that it does not take, or none at all."""
        for data in files:
            if self._vision is None:
                raise InputError(self._blind)
            self._vision.token_count(data)

    def places(self, ids: Int32, images: Sequence[tuple[str, bytes]]) -> tuple[Int32, tuple[ImagePlace, ...]]:
        """Give each image as many tokens as it has pieces.

        Args:
            ids: int32 (T,), with one token for each image, as `encode` made them.
            images: digests and files, in their order.

        Raises:
            InputError: the template has left one out.
        """
        if self._vision is None:
            return ids, ()
        at = np.flatnonzero(ids == self._vision.token_id)
        if len(at) != len(images):
            raise InputError(
                f"the chat template of {self.name} writes {len(at)} of {len(images)} images: it has no place for them "
                "in some of these messages; put them into a user's"
            )
        counts = np.ones(len(ids), np.int64)
        counts[at] = [self._vision.token_count(data) for _, data in images]
        ends = np.cumsum(counts)
        places = [
            ImagePlace(int(ends[index] - counts[index]), int(ends[index]), digest)
            for index, (digest, _) in zip(at, images, strict=True)
        ]
        return np.repeat(ids, counts), tuple(places)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, special tokens as their texts."""
        numbers = [int(each) for each in ids]
        text: str = self._tokenizer.decode(numbers, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def read(self, text: str, *, prompt: str, tools: Sequence[Tool] = ()) -> Reading:
        """Read reasoning, content and tool calls out of an answer's text, without its end; `prompt` stood before it."""
        shipped = getattr(self._tokenizer, "response_template", None)
        return read_text(
            without_marks(text), form=self.form, tags=self._tags, prompt=prompt, tools=tools, shipped=shipped
        )

    def tag(self, choice: ToolChoice, tools: Sequence[Tool], *, prompt: str) -> str:
        """Write the structural tag of answers that call these checked tools as chosen; empty: all answers do.

        Raises:
            InputError: no grammar for this template can promise it.
        """
        chosen = check_choice(choice, tools)
        return "" if chosen == FREE else tag_of(chosen, tools, self._model, without_marks(prompt))

    def _apply(self, messages: list[Message], tools: Any, answer: bool, options: Mapping[str, Any]) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=answer, **options
            )
        except Exception as error:  # the template is the model's program; the caller gets it as InputError
            raise InputError(
                f"the chat template of {self.name} refuses the messages: {one_line(str(error)) or type(error).__name__}"
            ) from error
        return text

    def _marked(self, message: Message) -> Message:
        """Return a message as the template takes it: arguments as values, and nothing in it that is a control token."""
        shaped = self._shape_calls(_opened(message))
        if shaped["role"] == "developer" and "developer" not in self._text:
            shaped["role"] = "system"  # its older name
        control = self._spoken if message["role"] == "assistant" else self._control
        return {key: control.broken_up(value) for key, value in shaped.items()}

    def _ids_of(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _ids_inside(self, text: str) -> list[int]:
        """Ids of a text that stands inside another; some tokenizers put a space before the start of any text."""
        ids, count = self._ids_of(f"\n{text}"), len(self._newline)
        return ids[count:] if ids[:count] == self._newline else self._ids_of(text)

    def _control_tokens(self) -> tuple[set[str], set[str]]:
        """Special tokens, and added ones that the template writes."""
        added = list(self._tokenizer.added_tokens_decoder.values())
        special = {token.content for token in added if token.special}
        return special, {token.content for token in added if token.content in self._text and token.content.strip()}

    def _is_end(self, token_id: int, text: str) -> bool:
        return token_id in self.stop_ids and self._ids_of(f"{text}x")[:1] == [token_id]

    def _find_shape(self) -> Callable[[Message], Message]:
        """Find how the template wants tool calls: some join the arguments to a text, some want no content beside.

        Found by trying, in the order in which templates are common.
        """
        for shape in (_values, _texts, _values_alone, _texts_alone):
            text = self._tried([USER_PROBE, shape(_opened(CALL_PROBE))])
            if text is not None and PROBE_NAME in text and PROBE_VALUE in text:
                return shape
        return _values

    def _is_silent(self, role: str) -> bool:
        """Tell whether the template takes messages of a role and writes nothing of them."""
        message = {"role": role, "content": PROBE_TEXT}
        if role == "tool":
            message["tool_call_id"] = CALL_PROBE["tool_calls"][0]["id"]
            text = self._tried([USER_PROBE, self._shape_calls(_opened(CALL_PROBE)), message])
        else:
            text = self._tried([message, USER_PROBE])
        return text is not None and PROBE_TEXT not in text

    def _closing_ids(self) -> list[int]:
        """Find the first control token that the template writes after an answer's text, if there is one."""
        _, _, tail = (self._tried([USER_PROBE, {"role": "assistant", "content": PROBE_TEXT}]) or "").rpartition(
            PROBE_TEXT
        )
        token = self._special.first_in(tail)
        return [] if token is None else [self._added[token]]

    def _tried(self, messages: list[Message]) -> str | None:
        """Render messages that a template may refuse; None: it does."""
        try:
            return self._apply(messages, None, False, {})
        except InputError:
            return None


def _opened(message: Message) -> Message:
    """Copy a message as templates read it: an assistant always has content, reasoning has two names, images none."""
    copy = dict(message)
    if isinstance(copy.get("content"), list):
        copy["content"] = [part if part["type"] == "text" else {"type": "image"} for part in copy["content"]]
    if copy["role"] == "assistant":
        copy.setdefault("content", "")
    if "reasoning_content" in copy:
        copy["thinking"] = copy["reasoning_content"]
    return copy


def _texts(message: Message) -> Message:
    return message


def _values(message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _texts_alone(message: Message) -> Message:
    if "tool_calls" not in message or message["content"]:
        return message
    return {key: value for key, value in message.items() if key != "content"}


def _values_alone(message: Message) -> Message:
    return _texts_alone(_values(message))


def named_ends(model: str) -> list[int]:
    """Read the ids that end an answer out of a model's generation_config.json, where this machine has one.

    Args:
        model: a directory, or a hub name whose files lie in the library's cache.

    Raises:
        ConfigError: the file cannot be read.
    """
    from transformers.utils import cached_file

    place = cached_file(
        model,
        "generation_config.json",
        local_files_only=True,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        _raise_exceptions_for_gated_repo=False,
    )
    try:
        config = load_json(Path(place).read_bytes()) if place else {}
    except OSError as error:
        raise ConfigError(f"{place} cannot be read: {error.strerror}", model=model) from error
    except WireError as error:
        raise ConfigError(f"{place} cannot be read: {error.message}. {DAMAGED}", model=model) from error
    eos = config.get("eos_token_id") if isinstance(config, dict) else None
    return [each for each in (eos if isinstance(eos, list) else [eos]) if isinstance(each, int)]
