"""Families of chat templates in a few lines each, with the structural quirks of the real ones, and tokenizers.

- A template is written anew here; what it shares with the real one is what decides whether a conversation continues.
- A tokenizer is a small real one: BPE over bytes, trained on a few lines, with the family's special tokens. Mistral's
  is like sentencepiece's: a space before the start of each text, and bytes for what it does not know.
- `write` is how the policy writes a message, by hand: nothing of the code under test.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rollfab.fabric.chat.template import ChatTemplate
from rollfab.fabric.chat.vision import Vision

Message = dict[str, Any]
LINES = (
    "You are a helpful assistant. The weather in Paris is mild, and in Rome it is hot.",
    'Call a tool: {"name": "look", "arguments": {"place": "Paris", "days": 2}}',
    "think first, then answer; the user asks, the assistant answers, the system rules\n\n# Tools\n",
    "one two three four five six seven eight nine ten, again and again and again.",
)

QWEN25 = r"""{%- set first = messages[0].content if messages[0].role == 'system' else 'You are Qwen.' %}
{{- '<|im_start|>system\n' + first }}
{%- if tools %}
{{- '\n\n# Tools\n\n<tools>' }}
{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{% endfor %}{{- '\n</tools>' }}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first)
   or (message.role == 'assistant' and not message.tool_calls) %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant' }}
{%- if message.content %}{{- '\n' + message.content }}{% endif %}
{%- for call in message.tool_calls %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""

# Content with images is a list of parts, of users and tools alike.
SHOWN = r"""{%- macro shown(content) %}
{%- if content is string %}{{- content }}
{%- else %}
{%- for part in content %}
{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{- part.text }}{% endif %}
{%- endfor %}
{%- endif %}
{%- endmacro %}
"""
QWEN25_VL = SHOWN + QWEN25.replace(
    "+ message.role + '\\n' + message.content +", "+ message.role + '\\n' + shown(message.content) +"
).replace("<tool_response>\\n' + message.content +", "<tool_response>\\n' + shown(message.content) +")

# Keeps reasoning only after the last query of a user; the last message always has a block for it.
QWEN3 = r"""{%- if tools %}
{{- '<|im_start|>system\n' + (messages[0].content + '\n\n' if messages[0].role == 'system' else '') }}
{{- '# Tools\n\n<tools>' }}
{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{% endfor %}{{- '\n</tools><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}
{%- set content = message.content %}{%- set reasoning = message.reasoning_content or '' %}
{%- if not reasoning and '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].split('<think>')[-1] %}
{%- set content = content.split('</think>')[-1] %}
{%- endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last and (loop.last or reasoning) %}
{{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
{%- else %}{{- content }}{% endif %}
{%- for call in message.tool_calls or [] %}
{%- if (loop.first and content) or not loop.first %}{{- '\n' }}{% endif %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""
QWEN3_THINKING = QWEN3[: QWEN3.rindex("{%- if enable_thinking")] + r"{{- '<think>\n' }}{% endif %}"

# Tools stand in the first user's message; texts are trimmed; one call per message.
LLAMA3 = r"""{{- bos_token }}
{%- set ns = namespace(told=false) %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}{{- message.content | tojson }}{{- '<|eot_id|>' }}
{%- elif message.tool_calls %}
{%- if message.tool_calls | length != 1 %}
{{- raise_exception('This model only supports single tool-calls at once!') }}
{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}
{%- if message.role == 'user' and tools and not ns.told %}
{%- set ns.told = true %}
{%- for tool in tools %}{{- tool | tojson }}{{- '\n' }}{% endfor %}
{%- endif %}
{{- message.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
{#- <|python_tag|> #}"""

# Tools stand before the last user's message, wherever that is by now; ids have nine letters; roles must alternate.
MISTRAL = r"""{{- bos_token }}
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- set rest = messages[1:] if system else messages %}
{%- set ns = namespace(last=0, turn='user') %}
{%- for message in rest %}
{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{% endif %}
{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
{%- if message.role != ns.turn %}{{- raise_exception('roles must alternate user and assistant') }}{% endif %}
{%- set ns.turn = 'assistant' if ns.turn == 'user' else 'user' %}
{%- endif %}
{%- endfor %}
{%- for message in rest %}
{%- if message.role == 'user' %}
{%- if tools and loop.index0 == ns.last %}
{{- '[AVAILABLE_TOOLS] ' }}{{- tools | tojson }}{{- '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{{- '[INST] ' + (system + '\n\n' if system and loop.index0 == ns.last else '') + message.content + '[/INST]' }}
{%- elif message.tool_calls %}
{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{%- if call.id is not defined or call.id | length != 9 %}
{{- raise_exception('Tool call IDs should be of length 9!') }}
{%- endif %}
{{- '{"name": "' + call.function.name + '", "arguments": ' }}{{- call.function.arguments | tojson }}
{{- ', "id": "' + call.id + '"}' }}{%- if not loop.last %}{{- ', ' }}{% endif %}
{%- endfor %}
{{- ']' + eos_token }}
{%- elif message.role == 'assistant' %}{{- message.content + eos_token }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS] {"content": ' }}{{- message.content | tojson }}
{{- ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- endif %}
{%- endfor %}"""

# No system messages and no tools; texts are trimmed; roles must alternate.
GEMMA = r"""{{- bos_token }}
{%- if messages[0].role == 'system' %}{{- raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate') }}
{%- endif %}
{%- set role = 'model' if message.role == 'assistant' else message.role %}
{{- '<start_of_turn>' + role + '\n' + message.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{% endif %}"""

# The prompt opens the reasoning; history never has any. Arguments are joined to a text.
DEEPSEEK = r"""{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'system' %}{{- message.content }}
{%- elif message.role == 'user' %}{{- '<｜User｜>' + message.content }}
{%- elif message.tool_calls %}
{{- '<｜Assistant｜>' + message.content + '<｜tool▁calls▁begin｜>' }}
{%- for call in message.tool_calls %}
{%- if not loop.first %}{{- '\n' }}{% endif %}
{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name + '\n```json\n' + call.function.arguments }}
{{- '\n```<｜tool▁call▁end｜>' }}
{%- endfor %}
{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
{%- elif message.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<｜tool▁outputs▁begin｜>' }}{% endif %}
{{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<｜tool▁outputs▁end｜>' }}{% endif %}
{%- else %}{{- '<｜Assistant｜>' + message.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}
{%- endif %}
{%- endfor %}
{%- if tools %}{% endif %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\n' }}{% endif %}"""

# What ends an answer is the beginning of the next message. Keeps reasoning only after the last user's message.
GLM = r"""{{- '[gMASK]<sop>' }}
{%- if tools %}
{{- '<|system|>\n# Tools\n' }}{% for tool in tools %}{{- tool | tojson }}{{- '\n' }}{% endfor %}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '<|user|>\n' + message.content }}
{%- elif message.role == 'assistant' %}
{{- '<|assistant|>' }}
{%- if loop.index0 > ns.last and message.reasoning_content %}
{{- '\n<think>' + message.reasoning_content.strip() + '</think>' }}
{%- else %}{{- '\n<think></think>' }}{% endif %}
{%- if message.content.strip() %}{{- '\n' + message.content.strip() }}{% endif %}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>' + call.function.name + '\n' }}
{%- for key, value in call.function.arguments.items() %}
{{- '<arg_key>' + key + '</arg_key>\n<arg_value>' }}
{{- value if value is string else value | tojson }}{{- '</arg_value>\n' }}
{%- endfor %}
{{- '</tool_call>' }}
{%- endfor %}
{%- elif message.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|observation|>' }}{% endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- elif message.role == 'system' %}{{- '<|system|>\n' + message.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}"""

# History ends final answers otherwise than the policy, and drops reasoning once a final answer has come.
GPT_OSS = r"""{{- '<|start|>system<|message|>You are ChatGPT.\n# Valid channels: analysis, commentary, final.<|end|>' }}
{%- set rest = messages[1:] if messages[0].role in ['system', 'developer'] else messages %}
{%- if rest | length != messages | length or tools %}
{{- '<|start|>developer<|message|># Instructions\n\n' }}
{%- if rest | length != messages | length %}{{- messages[0].content }}{% endif %}
{%- for tool in tools or [] %}{{- '\ntype ' + tool.function.name + ' = ' }}{{- tool | tojson }}{% endfor %}
{{- '<|end|>' }}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in rest %}
{%- if message.role == 'assistant' %}
{%- if message.tool_calls %}
{%- if message.content and message.thinking %}{{- raise_exception('Cannot pass both content and thinking') }}{% endif %}
{%- set future = namespace(final=false) %}
{%- for later in rest[loop.index:] %}
{%- if later.role == 'assistant' and not later.tool_calls %}{%- set future.final = true %}{% endif %}
{%- endfor %}
{%- if message.content %}
{{- '<|start|>assistant<|channel|>commentary<|message|>' + message.content + '<|end|>' }}
{%- elif message.thinking and not future.final %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson }}{{- '<|call|>' }}
{%- set last.name = call.name %}
{%- elif loop.last and not add_generation_prompt %}
{%- if message.thinking %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
{%- endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' }}
{%- else %}{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- endif %}
{%- elif message.role == 'tool' %}
{{- '<|start|>functions.' + (last.name or 'unknown') + ' to=assistant<|channel|>commentary<|message|>' }}
{{- message.content | tojson }}{{- '<|end|>' }}
{%- else %}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}"""


@dataclass(frozen=True)
class Family:
    """A family: its template, its special tokens, and what its policy and its clients may say."""

    name: str
    template: str
    special: tuple[str, ...]
    write: Callable[[Message], tuple[str, str]]  # a message → its text, and the token that ends it
    added: tuple[str, ...] = ()  # tokens that are not special, as <think> is
    bos: str | None = None
    eos: str = ""
    has_system: bool = True
    call_count_max: int = 2  # 0: no tools
    has_reasoning: bool = False
    is_like_sentencepiece: bool = False
    image_token: str = ""  # of a model that sees


def _calls(message: Message) -> list[tuple[str, Any]]:
    return [
        (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message.get("tool_calls", [])
    ]


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _hermes(message: Message) -> str:
    calls = [
        f'<tool_call>\n{{"name": "{name}", "arguments": {_dumps(arguments)}}}\n</tool_call>'
        for name, arguments in _calls(message)
    ]
    return "\n".join([*([message["content"]] if message.get("content") else []), *calls])


def write_qwen25(message: Message) -> tuple[str, str]:
    return _hermes(message), "<|im_end|>"


def write_qwen3(message: Message) -> tuple[str, str]:
    return f"<think>\n{message.get('reasoning_content', '')}\n</think>\n\n{_hermes(message)}", "<|im_end|>"


def write_qwen3_thinking(message: Message) -> tuple[str, str]:
    return f"{message.get('reasoning_content', '')}\n</think>\n\n{_hermes(message)}", "<|im_end|>"


def write_llama3(message: Message) -> tuple[str, str]:
    for name, arguments in _calls(message):
        return f'{{"name": "{name}", "parameters": {_dumps(arguments)}}}', "<|eot_id|>"
    return message["content"], "<|eot_id|>"


def write_mistral(message: Message) -> tuple[str, str]:
    calls = [
        f'{{"name": "{name}", "arguments": {_dumps(arguments)}, "id": "{call["id"]}"}}'
        for (name, arguments), call in zip(_calls(message), message.get("tool_calls", []), strict=True)
    ]
    return f"[TOOL_CALLS] [{', '.join(calls)}]" if calls else message["content"], "</s>"


def write_gemma(message: Message) -> tuple[str, str]:
    return message["content"], "<end_of_turn>"


def write_deepseek(message: Message) -> tuple[str, str]:
    calls = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_dumps(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in _calls(message)
    ]
    block = f"<｜tool▁calls▁begin｜>{chr(10).join(calls)}<｜tool▁calls▁end｜>" if calls else ""
    return (
        f"{message.get('reasoning_content', '')}\n</think>\n\n{message.get('content', '')}{block}",
        "<｜end▁of▁sentence｜>",
    )


def write_distilled(message: Message) -> tuple[str, str]:
    text, end = write_deepseek(message)
    reasoning, _, rest = text.partition("\n</think>\n\n")
    return (f"<think>\n{text}" if reasoning else rest), end


def write_glm(message: Message) -> tuple[str, str]:
    text = f"\n<think>{message.get('reasoning_content', '')}</think>"
    if message.get("content"):
        text += f"\n{message['content']}"
    for name, arguments in _calls(message):
        pairs = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{value if isinstance(value, str) else _dumps(value)}</arg_value>\n"
            for key, value in arguments.items()
        )
        text += f"\n<tool_call>{name}\n{pairs}</tool_call>"
    return text, "<|observation|>" if message.get("tool_calls") else "<|user|>"


def write_gpt_oss(message: Message) -> tuple[str, str]:
    thought = message.get("reasoning_content")
    parts = [f"<|channel|>analysis<|message|>{thought}<|end|>"] if thought else []
    for name, arguments in _calls(message):
        parts.append(f" to=functions.{name}<|channel|>commentary json<|message|>{_dumps(arguments)}")
        return "<|start|>assistant".join(parts), "<|call|>"
    parts.append(f"<|channel|>final<|message|>{message['content']}")
    return "<|start|>assistant".join(parts), "<|return|>"


THINK = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
IMAGE_TOKEN = "<|image_pad|>"
VISION = ("<|vision_start|>", "<|vision_end|>", IMAGE_TOKEN)
LLAMA_TOKENS = "<|begin_of_text|> <|eot_id|> <|eom_id|> <|start_header_id|> <|end_header_id|> <|python_tag|>"
MISTRAL_TOKENS = (
    "<s> </s> [INST] [/INST] [TOOL_CALLS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS]"
)
DEEPSEEK_TOKENS = (
    "<｜User｜> <｜Assistant｜> <think> </think> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> "
    "<｜tool▁call▁end｜> <｜tool▁sep｜> <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> "
    "<｜tool▁output▁end｜>"
)
GLM_TOKENS = "[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <|endoftext|>"
HARMONY_TOKENS = "<|start|> <|end|> <|message|> <|channel|> <|constrain|> <|call|> <|return|> <|endoftext|>"
FAMILIES = {
    family.name: family
    for family in (
        Family("qwen2.5", QWEN25, CHATML, write_qwen25, eos="<|im_end|>"),
        Family("qwen2.5-vl", QWEN25_VL, (*CHATML, *VISION), write_qwen25, eos="<|im_end|>", image_token=IMAGE_TOKEN),
        Family("qwen3", QWEN3, CHATML, write_qwen3, added=THINK, eos="<|im_end|>", has_reasoning=True),
        Family(
            "qwen3-thinking",  # the prompt opens the reasoning, and so does history after the last query
            QWEN3_THINKING,
            CHATML,
            write_qwen3_thinking,
            added=THINK,
            eos="<|im_end|>",
            has_reasoning=True,
        ),
        Family(
            "llama-3",
            LLAMA3,
            tuple(LLAMA_TOKENS.split()),
            write_llama3,
            bos="<|begin_of_text|>",
            eos="<|eot_id|>",
            call_count_max=1,
        ),
        Family(
            "mistral",
            MISTRAL,
            tuple(MISTRAL_TOKENS.split()),
            write_mistral,
            bos="<s>",
            eos="</s>",
            is_like_sentencepiece=True,
        ),
        Family(
            "gemma",
            GEMMA,
            ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
            write_gemma,
            bos="<bos>",
            eos="<eos>",
            has_system=False,
            call_count_max=0,
        ),
        Family(
            "deepseek-r1",
            DEEPSEEK,
            ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
            write_deepseek,
            added=tuple(DEEPSEEK_TOKENS.split()),
            bos="<｜begin▁of▁sentence｜>",
            eos="<｜end▁of▁sentence｜>",
            has_reasoning=True,
        ),
        Family(
            "deepseek-distilled",  # the same, but the policy opens its reasoning itself, or has none
            DEEPSEEK.replace("<｜Assistant｜><think>\\n", "<｜Assistant｜>"),
            ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
            write_distilled,
            added=tuple(DEEPSEEK_TOKENS.split()),
            bos="<｜begin▁of▁sentence｜>",
            eos="<｜end▁of▁sentence｜>",
            has_reasoning=True,
        ),
        Family(
            "glm-4.5",
            GLM,
            tuple(GLM_TOKENS.split()),
            write_glm,
            added=(*THINK, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
            eos="<|endoftext|>",
            has_reasoning=True,
        ),
        Family(
            "gpt-oss",
            GPT_OSS,
            tuple(HARMONY_TOKENS.split()),
            write_gpt_oss,
            eos="<|return|>",
            call_count_max=1,
            has_reasoning=True,
        ),
    )
}


def build_tokenizer(family: Family) -> PreTrainedTokenizerFast:
    """The family's tokenizer, with its template."""
    core = _sentencepiece_like() if family.is_like_sentencepiece else _byte_level()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in family.special])
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in family.added])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        chat_template=family.template,
        bos_token=family.bos,
        eos_token=family.eos,
        name_or_path=family.name,
    )


@cache
def chat_template(name: str) -> ChatTemplate:
    """The family's template, built once. A model that sees has the image processor of Qwen2-VL, for small images."""
    family = FAMILIES[name]
    tokenizer = build_tokenizer(family)
    if not family.image_token:
        return ChatTemplate(tokenizer)
    processor = Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=28 * 28 * 12)
    return ChatTemplate(tokenizer, vision=Vision(processor, tokenizer.convert_tokens_to_ids(family.image_token)))


def token_text(template: ChatTemplate, token_id: int) -> str | None:
    """The text of an added token; None: it is another one."""
    token = template._tokenizer.added_tokens_decoder.get(int(token_id))
    return None if token is None else str(token.content)


def _byte_level() -> Tokenizer:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(LINES, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False))
    return core


def _sentencepiece_like() -> Tokenizer:
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.train_from_iterator(LINES, trainers.BpeTrainer(vocab_size=150, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    vocabulary |= {token: index + 257 for index, token in enumerate(sorted(model["vocab"], key=model["vocab"].get))}
    merges = [tuple(merge) for merge in model["merges"]]
    core = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return core
