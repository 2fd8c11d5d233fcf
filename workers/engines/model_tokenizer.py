"""Which tokenizer a model has: the character tokenizer for presets, else the model's own, loaded when asked for.

The chat template of the presets is small enough for models that see a few hundred characters:

- A message is a letter for its role, its text and a newline: `s` system, `u` user, `t` a tool's result; `f` lists the
  names of the tools. An answer is `a`, its text and the end of sequence.
- A tool call is one token, CALL_ID, then the tool's name and its arguments as JSON. Where one tool is offered, the name
  may be left out, and no arguments mean {}: a random model makes such a call once in a hundred answers, and can learn.
"""

from __future__ import annotations

import os
import re
import shlex
import threading
from collections.abc import Iterable, Mapping
from functools import cache, cached_property
from typing import Any

import numpy as np

from ...fabric.chat.template import ChatTemplate, named_ends
from ...fabric.contract.errors import ConfigError
from ...fabric.contract.records import Int32
from ...fabric.contract.text import printable
from ...fabric.model.presets import check_tokenizer_files, is_path, is_preset
from ...fabric.model.tokenizer import CharTokenizer, Tokenizer

REASON_LENGTH_MAX = 300
UNFIT = (OSError, ValueError, LookupError, TypeError, AttributeError)  # what files of another shape cause
BYTE = re.compile("<0x[0-9A-F]{2}>")  # sentencepiece's name of a byte token
IMPORTING = threading.Lock()  # while transformers is imported: a second thread would find half of it
CALL_ID = 100
CALL = "<|preset_call|>"  # is known by fabric/chat/forms.py
TEMPLATE = (
    "{%- if tools %}f{% for tool in tools %}{{ tool.function.name }} {% endfor %}\n{% endif -%}"
    "{%- for message in messages -%}"
    "{%- if message.role == 'assistant' -%}a{{ message.content }}"
    "{%- for call in message.tool_calls or [] -%}"
    "<|preset_call|>{{ call.function.name }} {{ call.function.arguments | tojson }}"
    "{%- endfor -%}</s>"
    "{%- else -%}{{ message.role[0] }}{{ message.content }}{{ '\n' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}a{%- endif -%}"
)


def _why(error: Exception) -> str:
    if isinstance(error, OSError | ValueError):
        return str(error)
    return "its files are JSON, and hold something else than a tokenizer"


class HubTokenizer:
    """A tokenizer from a path or hub name. Needs the transformers library, which it imports.

    may_download: else it must lie on this machine, in a directory or in the library's own cache.
    """

    def __init__(self, model: str, *, may_download: bool = False) -> None:
        with IMPORTING:
            from transformers import AutoTokenizer

        is_here = is_path(model) or os.path.isdir(model)
        check_tokenizer_files(model)
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                model, trust_remote_code=False, local_files_only=is_here or not may_download
            )
        except UNFIT as error:
            if not (is_here or may_download):
                raise ConfigError(
                    f"model {model!r} is not on this machine, and may not be downloaded for a run that names it: start "
                    f"the agent with --allow-hub {shlex.quote(model)}, or name the directory of a model",
                    model=model,
                ) from error
            raise ConfigError(
                f"model {model!r} has no tokenizer that can be loaded: {_why(error)}. Give a preset, a path or a hub "
                "name",
                model=model,
            ) from error
        if not len(self.encode("a")):  # the library makes empty ones
            raise ConfigError(
                f"model {model!r} has no tokenizer that can be loaded: its files hold no vocabulary, as tokenizer.json "
                "does. Give a preset, a path or a hub name",
                model=model,
            )

    @property
    def vocabulary_size(self) -> int:
        return len(self._tokenizer)

    @property
    def bos_id(self) -> int | None:
        identifier: int | None = self._tokenizer.bos_token_id
        return identifier

    @property
    def eos_id(self) -> int | None:
        identifier: int | None = self._tokenizer.eos_token_id
        return identifier

    @cached_property
    def chat(self) -> ChatTemplate:
        """The model's chat template. Raises ConfigError: it has none."""
        return ChatTemplate.of(self._tokenizer, self._tokenizer.name_or_path)

    @cached_property
    def special_ids(self) -> Mapping[str, int]:
        added = self._tokenizer.added_tokens_decoder.items()
        return {token.content: int(number) for number, token in added if token.special}

    def is_byte(self, token: int) -> bool:
        return BYTE.fullmatch(self._tokenizer.convert_ids_to_tokens(int(token)) or "") is not None

    def encode(self, text: str) -> Int32:
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        text: str = self._tokenizer.decode(
            list(map(int, ids)), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


def chat_of(tokenizer: Tokenizer, model: str) -> ChatTemplate:
    """Return the chat template of a model.

    Raises:
        ConfigError: it has none.
    """
    if isinstance(tokenizer, HubTokenizer):
        with IMPORTING:  # made once, though several trajectories begin together
            return tokenizer.chat
    if isinstance(tokenizer, CharTokenizer):
        return preset_chat()
    raise ConfigError(f"model {model!r} has no chat template: environments speak to it in plain text", model=model)


def ends_of(tokenizer: Tokenizer, model: str) -> tuple[int, ...]:
    """Return the tokens that end a model's answers where nobody speaks of chat: its end of sequence, and those that its
    generation_config.json names, as vLLM and SGLang take them.

    Raises:
        ConfigError: that file cannot be read.
    """
    own = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    named = named_ends(model) if isinstance(tokenizer, HubTokenizer) else ()
    return tuple(dict.fromkeys((*own, *named)))


def load_tokenizer(model: str, *, may_download: bool = False) -> Tokenizer:
    """The tokenizer of a preset, path or hub name; a hub's is downloaded where that is allowed.

    Raises:
        ConfigError: it can not be loaded.
    """
    return CharTokenizer() if is_preset(model) else HubTokenizer(model, may_download=may_download)


def find_tokenizer(model: str) -> tuple[Tokenizer | None, str]:
    """The tokenizer of a model that an engine here has loaded; or None, and why there is none. May take seconds."""
    reason = f"model {model!r} has no tokenizer, without which it reads no text: put the tokenizer's files beside it"
    try:
        return load_tokenizer(model, may_download=True), ""
    except Exception as error:  # noqa: BLE001 - of a model's files: the caller goes on without, and tells why
        return None, f"{reason} ({printable(repr(error))[:REASON_LENGTH_MAX]})"


@cache
def preset_chat() -> ChatTemplate:
    """Make the chat template that goes with CharTokenizer: the same ids, and CALL_ID beside them."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    with IMPORTING:
        from transformers import PreTrainedTokenizerFast

    known = CharTokenizer()
    names = {"<pad>": known.pad_id, "<s>": known.bos_id, "</s>": known.eos_id, "\ufffd": known.unknown_id}
    for number in range(known.unknown_id + 1, known.vocabulary_size):
        text = known.decode([number])
        names[CALL if number == CALL_ID else text if text != "\ufffd" else f"<|{number}|>"] = number
    made = Tokenizer(models.WordLevel(names, unk_token="\ufffd"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens(["<pad>", "<s>", "</s>", CALL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="\ufffd"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.name_or_path = "the presets"
    return ChatTemplate(tokenizer)
