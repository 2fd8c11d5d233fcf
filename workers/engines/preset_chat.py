"""The chat template of the presets, small enough for models that see a few hundred characters.

- A message is a letter for its role, its text and a newline: `s` system, `u` user, `t` a tool's result; `f` lists the
  names of the tools. An answer is `a`, its text and the end of sequence.
- A tool call is one token, CALL_ID, then the tool's name and its arguments as JSON. Where one tool is offered, the name
  may be left out, and no arguments mean {}: a random model makes such a call once in a hundred answers, and can learn.
"""

from __future__ import annotations

import threading
from functools import cache

from ...fabric.chat.template import ChatTemplate
from ...fabric.model.tokenizer import CharTokenizer

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


IMPORTING = threading.Lock()  # while transformers is imported: a second thread would find half of it


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
