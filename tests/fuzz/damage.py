"""Damaged bytes, as a hypothesis strategy: cut, flipped, doubled, spliced with another input, and records whose
metadata says something else than it did while every length around it still fits; and JSON with anything anywhere."""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any

import httpx
from hypothesis import strategies as st

from rollfab.fabric.contract.wire import HEADER

LENGTHS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFF, 1 << 62, (1 << 64) - 1)
NUMBERS = st.sampled_from([-1, 0, 1, 2, 7, 1 << 31, -(1 << 31), 1 << 53, (1 << 63) - 1, -(1 << 63), 0.5, -1e308])
PLAIN = st.one_of(
    st.none(), st.booleans(), NUMBERS, st.text(max_size=8), st.sampled_from(["i4", "f4", "g.0", "keyframe"])
)
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner)),
    max_leaves=6,
)


@st.composite
def damaged(draw: st.DrawFn, seeds: tuple[bytes, ...]) -> bytes:
    """One of the seeds after a few accidents, or none."""
    data = draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(0, 4))):
        data = draw(st.sampled_from(ACCIDENTS))(draw, data, seeds)
    return data


def _place(draw: st.DrawFn, data: bytes) -> int:
    return draw(st.integers(0, len(data)))


def _flip(draw: st.DrawFn, data: bytes, seeds: tuple[bytes, ...]) -> bytes:
    if not data:
        return data
    at = draw(st.integers(0, len(data) - 1))
    return data[:at] + bytes([data[at] ^ draw(st.integers(1, 255))]) + data[at + 1 :]


def _cut(draw: st.DrawFn, data: bytes, seeds: tuple[bytes, ...]) -> bytes:
    start, end = sorted((_place(draw, data), _place(draw, data)))
    return data[:start] + data[end:]


def _double(draw: st.DrawFn, data: bytes, seeds: tuple[bytes, ...]) -> bytes:
    start, end = sorted((_place(draw, data), _place(draw, data)))
    return data[:end] + data[start:end] + data[end:]


def _splice(draw: st.DrawFn, data: bytes, seeds: tuple[bytes, ...]) -> bytes:
    other = draw(st.sampled_from(seeds))
    return data[: _place(draw, data)] + other[_place(draw, other) :]


def _length(draw: st.DrawFn, data: bytes, seeds: tuple[bytes, ...]) -> bytes:
    """Somewhere a number that looks like a length."""
    width = draw(st.sampled_from((1, 2, 4, 8)))
    number = draw(st.sampled_from(LENGTHS)) & ((1 << 8 * width) - 1)
    at = _place(draw, data)
    return data[:at] + number.to_bytes(width, "little") + data[at + width :]


def _noise(draw: st.DrawFn, data: bytes, seeds: tuple[bytes, ...]) -> bytes:
    at = _place(draw, data)
    return data[:at] + draw(st.binary(max_size=12)) + data[at:]


def _metadata(draw: st.DrawFn, data: bytes, seeds: tuple[bytes, ...]) -> bytes:
    """A record with another value, one field less or one more, and a header that fits; other bytes stay as they are."""
    try:
        magic, schema, kind, length = HEADER.unpack_from(data)
        meta = json.loads(data[HEADER.size : HEADER.size + length])
    except (ValueError, RecursionError, struct.error):
        return data
    if not isinstance(meta, dict) or not meta:
        return data
    _change(draw, meta)
    head = json.dumps(meta).encode("utf-8", "replace")
    head += b" " * (-(HEADER.size + len(head)) % 8)
    return HEADER.pack(magic, schema, kind, len(head)) + head + data[HEADER.size + length :]


def _change(draw: st.DrawFn, meta: dict[str, Any]) -> None:
    name = draw(st.sampled_from(sorted(meta)))
    value = meta[name]
    if isinstance(value, dict) and value and draw(st.booleans()):
        _change(draw, value)
    elif isinstance(value, list) and value and draw(st.booleans()):
        value[draw(st.integers(0, len(value) - 1))] = draw(VALUES)
    elif draw(st.integers(0, 5)) == 0:
        del meta[name]
        if draw(st.booleans()):
            meta[draw(st.text(max_size=5))] = value
    else:
        meta[name] = draw(VALUES)


ACCIDENTS = (_flip, _cut, _double, _splice, _length, _noise, _metadata, _metadata)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def spots(value: Any) -> list[tuple[Any, Any]]:
    """Every place in a JSON value: what holds it, and under which key or index."""
    if not isinstance(value, dict | list):
        return []
    here = [(value, key) for key in (value if isinstance(value, dict) else range(len(value)))]
    return here + [each for holder, key in here for each in spots(holder[key])]


def post(app: Any, path: str, content: bytes, key: str) -> httpx.Response:
    """What an application in this process answers; raises what it raises."""

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            return await http.post(path, content=content, headers={"authorization": f"Bearer {key}"})

    return asyncio.run(send())
