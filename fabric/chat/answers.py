"""An answer's text as a message: content, reasoning, tool calls.

- How a family writes is forms.py's. A tokenizer that ships a response template of its own is read by that where no
  family fits. The library's reader raises on malformed calls and keeps only the last of several stretches of content,
  so it is asked for events, its errors make the text content, and nothing is lost.
- A tool call that carries no fit id gets one that follows from a seed text, so a retry of the same answer names it
  alike.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import xxhash

from .forms import Call, Form, Reading, Schemas, read_answer
from .messages import Message, Tool

ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
CALL_ID_LENGTH = 9  # Mistral's templates refuse any other; 62**9 ids, so two of a thousand meet once in 10**10 times


def to_message(reading: Reading, seed: str) -> Message:
    """Make the message of what was read. seed: what the ids of its tool calls follow from."""
    reasoning, content, calls = reading
    message: Message = {"role": "assistant"}
    if content:
        message["content"] = content
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        written = Counter(call.id for call in calls)
        message["tool_calls"] = [
            {
                "id": call.id if _is_id(call.id) and written[call.id] == 1 else call_id(seed, index),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for index, call in enumerate(calls)
        ]
    return message


def call_id(seed: str, index: int) -> str:
    """Derive an id of nine letters and digits, the same for the same seed and index."""
    number = xxhash.xxh3_64_intdigest(f"{seed}/{index}".encode())
    letters = []
    for _ in range(CALL_ID_LENGTH):
        number, rest = divmod(number, len(ALPHABET))
        letters.append(ALPHABET[rest])
    return "".join(letters)


def _is_id(text: str | None) -> bool:
    """Tell whether an id that the policy wrote may stand: templates refuse others when it comes back."""
    return text is not None and len(text) == CALL_ID_LENGTH and all(letter in ALPHABET for letter in text)


def finish_of(message: Message, finish_reason: str) -> str:
    """Say how an answer ended, in OpenAI's words: length, tool_calls or stop."""
    if finish_reason == "length":
        return "length"
    return "tool_calls" if "tool_calls" in message else "stop"


def read_text(
    text: str,
    *,
    form: Form,
    tags: tuple[str, str] | None,
    prompt: str,
    tools: Sequence[Tool],
    shipped: dict[str, Any] | None = None,
) -> Reading:
    """Read reasoning, content and tool calls out of an answer.

    Args:
        text: without the token that ended it; special tokens as their texts.
        form: the family's. tags: around its reasoning.
        prompt: what stood before the answer; it may have opened the reasoning.
        tools: that were offered.
        shipped: the tokenizer's response template, used where the form is plain.
    """
    if shipped is not None and form.name == "plain":
        return _read_shipped(text, shipped, prompt, tools) or ("", text, [])
    is_open = tags is not None and prompt.rstrip().endswith(tags[0])
    return read_answer(form, text, _schemas(tools), tags, is_open=is_open)


def _schemas(tools: Sequence[Tool]) -> Schemas:
    functions = [tool["function"] for tool in tools]
    return {each["name"]: (each.get("parameters") or {}).get("properties") or {} for each in functions}


def _read_shipped(text: str, shipped: dict[str, Any], prompt: str, tools: Sequence[Tool]) -> Reading | None:
    """Read an answer by a response template; None: it cannot read the text, or finds nothing in it."""
    from transformers.utils.chat_parsing import ResponseParser

    try:
        parser = ResponseParser(shipped, prefix=prompt, tools=list(tools))
        events = parser.feed(text)
        message, more = parser.finalize()
        events += more
        calls = [
            Call(call["function"]["name"], json.dumps(call["function"]["arguments"], ensure_ascii=False))
            for call in message.get("tool_calls", [])
        ]
    except Exception:  # noqa: BLE001 - template and text may be anything; the caller takes it for content
        return None
    content = "".join(event["text"] for event in events if event.get("field") == "content" and "text" in event)
    reasoning = next((message[key] for key in ("reasoning_content", "thinking") if message.get(key)), "")
    if not (content or reasoning or calls) or not isinstance(reasoning, str):
        return None
    return reasoning, content.strip() if calls or reasoning else content, calls
