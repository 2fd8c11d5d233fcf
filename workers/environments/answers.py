"""What worlds answer, checked before it is tokenised, encoded, logged or sent: alike in a process and inside the agent.

- Its size is bounded by `fit` of process_main.py, which a process calls on its own answers before it sends them.
- Messages and tools that were checked are copies: a world may change its own, and the episode's stay as they were said.
- What could not be heard is refused, and never dropped: tools without messages, messages in an episode of texts, and
  messages beside a text.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from ...fabric.chat.image_parts import url_bytes
from ...fabric.chat.messages import check_messages, check_tools
from ...fabric.contract.errors import EnvironmentFailed, InputError, PayloadTooLarge
from ...fabric.contract.limits import INFO_BYTES_MAX, KIB, OBSERVATION_BYTES_MAX
from ...fabric.contract.sampling import TOKEN_ID_MAX, is_whole
from ...fabric.contract.text import one_line
from ...fabric.contract.wire import check_size, dump_json
from .base import Observation, Step, show
from .process_main import Refused, fit, flag
from .spawn import ROW_LIMITS

BRIEF = 16 * KIB  # characters, or values: a thread checks, tokenises and encodes anything longer


async def check_observation(answer: Any, where: str) -> Observation:
    """Return a reset's answer as it is used; `where` begins the text of an error.

    Raises:
        EnvironmentFailed: it is none, or too large.
    """
    if not (isinstance(answer, Observation) and _is_said(answer) and _is_list(answer.tools) and _is_list(answer.ids)):
        raise _failed(where, "reset", f"gave {show(answer)}, expected an Observation with text, messages or ids")
    if answer.ids and (answer.text or answer.messages):
        raise _failed(where, "reset", "gave ids beside a text or messages, of which one is heard")
    if answer.tools and not answer.messages:
        advice = 'a text has no place for them, say it as a message: {"role": "user", "content": …}'
        raise _failed(where, "reset", f"gave tools without messages: {advice}")
    lists = {name: getattr(answer, name) or [] for name in ("messages", "tools", "ids")}
    return Observation(**await _check(where, "reset", {"text": answer.text, "info": answer.info, **lists}))


async def check_step(answer: Any, where: str, *, is_chat: bool) -> Step:
    """Return a step's answer as it is used. is_chat: the episode began with messages.

    Raises:
        EnvironmentFailed: it is none, or too large.
    """
    if not (isinstance(answer, Step) and _is_said(answer) and isinstance(answer.info, dict)):
        raise _failed(where, "step", f"gave {show(answer)}, expected a Step with text or messages, and a dict of info")
    if answer.messages and not is_chat:
        advice = "begin it with messages, or answer with a text"
        raise _failed(where, "step", f"gave messages, though the episode began with a text: {advice}")
    try:
        terminated, truncated = (
            flag("step", "terminated", answer.terminated),
            flag("step", "truncated", answer.truncated),
        )
    except Refused as error:
        raise EnvironmentFailed(f"{where}: {error}", reason="step") from error
    row = await _check(where, "step", {"text": answer.text, "info": answer.info, "messages": answer.messages or []})
    return Step(reward=answer.reward, terminated=terminated, truncated=truncated, **row)


def _is_said(answer: Observation | Step) -> bool:
    """Tell whether it has a text, and messages that are a list."""
    return isinstance(answer.text, str) and _is_list(answer.messages)


def _is_list(value: Any) -> bool:
    """Tell whether it is what JSON writes as a list, or nothing."""
    return value is None or isinstance(value, list | tuple)


async def _check(where: str, what: str, row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with messages and tools as copies."""
    if row["text"] and row["messages"]:
        raise _failed(where, what, "gave a text and messages, of which one is heard: say the text in a message")
    try:
        size = len(row["text"]) if _is_text_alone(row) else weigh(list(row.values()), BRIEF)
        if size > BRIEF:
            return await asyncio.to_thread(_checked, what, row)
        return _fitting(what, row)  # each part weighs less than its limit
    except (Refused, PayloadTooLarge) as error:
        raise EnvironmentFailed(f"{where}: {error}", reason=what) from error


def _is_text_alone(row: dict[str, Any]) -> bool:
    return all(type(value) in (dict, list) and not value for name, value in row.items() if name != "text")


def _checked(what: str, row: dict[str, Any]) -> dict[str, Any]:
    _check_weight(f"{what}: its info is", row["info"], INFO_BYTES_MAX)
    for name in ("messages", "tools", "ids"):
        _check_weight(f"{what}: its {name} are", row.get(name), ROW_LIMITS.get(name, OBSERVATION_BYTES_MAX))
    return _fitting(what, row)


def _fitting(what: str, row: dict[str, Any]) -> dict[str, Any]:
    fit(what, row, ROW_LIMITS)
    for index, each in enumerate(row.get("ids", ())):
        if not (is_whole(each) and 0 <= each <= TOKEN_ID_MAX):
            said = (
                f"number {index} of its ids is {one_line(f'{each!r:.40}')}, expected a token id, 0 to {TOKEN_ID_MAX:,}"
            )
            raise Refused("answer", f"{what}: {said}")
    if not row["messages"] and not row.get("tools"):
        return row
    checks = {"messages": check_messages, "tools": check_tools}
    try:
        checked = {**row, **{name: check(row[name]) for name, check in checks.items() if row.get(name)}}
    except (InputError, PayloadTooLarge) as error:
        raise Refused("answer", f"{what}: {error.message}") from error
    size = len(dump_json(checked["messages"])) - url_bytes(checked["messages"])
    if size > OBSERVATION_BYTES_MAX:
        limit = f"the limit is {OBSERVATION_BYTES_MAX:,}: let them be shorter"
        raise Refused("answer", f"{what}: its messages are {size:,} bytes as JSON, without their images; {limit}")
    return checked


def _failed(where: str, what: str, text: str) -> EnvironmentFailed:
    return EnvironmentFailed(f"{where}: {what} {text}", reason=what)


# ---- sizes


def dump_within(what: str, value: object, bytes_max: int) -> bytes:
    """Encode a value as JSON of at most `bytes_max` bytes.

    Raises:
        InputError: the value cannot be JSON, or is too large.
    """
    _check_weight(f"{what} is", value, bytes_max)
    return check_size(what, dump_json(value), bytes_max, next_step="say less in it")


def _check_weight(what_is: str, value: object, bytes_max: int) -> None:
    """Refuse a value of any size before it is encoded. Raises PayloadTooLarge."""
    if weigh(value, bytes_max) > bytes_max:
        raise PayloadTooLarge(f"{what_is} more than {bytes_max:,} bytes as JSON, the limit: say less in it")


def weigh(value: object, limit: int) -> int:
    """Count the bytes that plain values take as JSON at the least; stop once the count exceeds `limit`."""
    total, left = 0, [value]
    while left and total <= limit:
        each = left.pop()
        total += 2 + (len(each) if isinstance(each, (str, bytes)) else 0)
        if isinstance(each, dict):
            room = max(0, limit - total)
            left += [part for pair in itertools.islice(dict.items(each), room) for part in pair]
        elif isinstance(each, (list, tuple)):
            left += each[: max(0, limit - total) + 1]
    return total
