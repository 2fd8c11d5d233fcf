"""Images in chat messages: which parts are taken, and how their bytes are kept apart from what was said.

- A client sends an image as OpenAI's `image_url` part, whose url holds the file itself. Nothing is fetched: a prompt
  must not make this process call an address, and what lies there may be another image tomorrow.
- A conversation keeps each file once, by its digest, and says `{"type": "image", "digest": …}` where it stands. A later
  message of the same conversation may say so too.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..contract.errors import InputError, PayloadTooLarge
from ..contract.images import DIGEST_LENGTH, digest_of
from ..contract.limits import IMAGE_BYTES_MAX
from ..contract.text import one_line

Message = dict[str, Any]
Part = dict[str, Any]

DATA_URL = re.compile(r"data:image/[a-z+.-]{1,20};base64,", re.IGNORECASE)
DIGEST = re.compile(rf"[0-9a-f]{{{DIGEST_LENGTH}}}")
DETAILS = (None, "auto", "high")  # an image is read as it is, within what its model takes


def check_image(part: Mapping[str, Any], where: str) -> Part:
    """Return an image part as everything here takes it.

    Raises:
        InputError: it is none; names the key and what is allowed.
        PayloadTooLarge: its file is too large.
    """
    if part["type"] == "image" and set(part) == {"type", "digest"} and DIGEST.fullmatch(str(part["digest"])):
        return dict(part)
    image = part.get("image_url")
    if set(part) != {"type", "image_url"} or not isinstance(image, Mapping) or set(image) - {"url", "detail"}:
        raise InputError(
            f'{where}: expected {{"type": "image_url", "image_url": {{"url": "data:image/png;base64,…"}}}}'
        )
    if image.get("detail") not in DETAILS:
        raise InputError(f"{where}: detail is {image['detail']!r:.40}, expected auto or high")
    url = image.get("url")
    if not isinstance(url, str) or not DATA_URL.match(url):
        raise InputError(
            f"{where}: url is {one_line(f'{url!r:.40}')}, expected the image itself, as data:image/png;base64,…: "
            "nothing is fetched from an address"
        )
    size = len(_file(url, where))
    if not 0 < size <= IMAGE_BYTES_MAX:
        raise PayloadTooLarge(
            f"{where}: the image has {size:,} bytes, expected 1 to {IMAGE_BYTES_MAX:,}: send a smaller one",
            size_bytes=size,
            limit_bytes=IMAGE_BYTES_MAX,
        )
    return {"type": "image_url", "image_url": {"url": url}}


def images_in(messages: Iterable[Mapping[str, Any]]) -> Iterator[Part]:
    """Go through the image parts of checked messages, in their order."""
    for message in messages:
        if isinstance(content := message.get("content"), list):
            yield from (part for part in content if part["type"] != "text")


def url_bytes(messages: Iterable[Mapping[str, Any]]) -> int:
    """Count the bytes of messages that are images: of the rest, text, each costs a tokenizer far more."""
    return sum(len(part["image_url"]["url"]) for part in images_in(messages) if part["type"] == "image_url")


def without_files(messages: Sequence[Message]) -> tuple[list[Message], dict[str, bytes]]:
    """Return checked messages that name their images by digest, and the files that they brought, by digest."""
    files: dict[str, bytes] = {}

    def named(part: Part) -> Part:
        if part["type"] != "image_url":
            return part
        data = _file(part["image_url"]["url"], "image_url")
        digest = digest_of(data)
        files[digest] = data
        return {"type": "image", "digest": digest}

    return [_with_parts(each, named) for each in messages], files


def with_files(messages: Sequence[Message], files: Mapping[str, bytes]) -> list[Message]:
    """Return messages as they were before `without_files`: images as data: URLs, from which anybody can read them."""

    def brought(part: Part) -> Part:
        if part["type"] != "image":
            return part
        url = f"data:image/unknown;base64,{base64.b64encode(files[part['digest']]).decode()}"
        return {"type": "image_url", "image_url": {"url": url}}

    return [_with_parts(each, brought) for each in messages]


def _with_parts(message: Message, change: Callable[[Part], Part]) -> Message:
    content = message.get("content")
    return {**message, "content": list(map(change, content))} if isinstance(content, list) else message


def _file(url: str, where: str) -> bytes:
    """Return the bytes of a data: URL. Raises InputError."""
    try:
        return base64.b64decode(url[url.index(",") + 1 :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(f"{where}: the url is no base64: {error}") from error
