"""Images in a context: the bytes of a file, exactly as they were sent, and the tokens that stand for it.

- An image is known by the digest of its bytes. A job names the places and digests of its images; the broker keeps the
  bytes once for a trajectory, and a rollout holds them as a side array (sides.py) called `images`: a row for each byte,
  all of them at the image's first token.
- What a model reads, pixels and grids, is made of the bytes where it is needed, by one function for engines and
  trainers (fabric/chat/vision.py): a file is ten to thirty times smaller than its pixels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from .errors import WireError
from .sides import Side

IMAGES = "images"  # the side array's name
DIGEST_LENGTH = 32
NO_FILES: Mapping[str, bytes] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ImagePlace:
    """Tokens [start, end) of a context, which stand for the image with this digest."""

    start: int
    end: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An image, and the tokens [start, end) that stand for it. data: a PNG, JPEG or WebP file."""

    start: int
    end: int
    digest: str
    data: bytes = field(repr=False)


def digest_of(data: bytes) -> str:
    """Return the name of an image: the first half of the SHA-256 of its bytes, in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()[:DIGEST_LENGTH]


def check_places(places: Sequence[ImagePlace], token_count: int, where: str) -> None:
    """Require that images stand in [0, token_count), in order and apart. Raises WireError."""
    end = 0
    for place in places:
        if not end <= place.start < place.end <= token_count or len(place.digest) != DIGEST_LENGTH:
            raise WireError(f"{where}.images: {place!r:.100} does not fit {token_count} tokens, or those before it")
        end = place.end


def image_side(place: ImagePlace, data: bytes) -> Side:
    """Return an image as a side array of its tokens."""
    counts = np.zeros(place.end - place.start, np.int32)
    counts[0] = len(data)
    array = np.frombuffer(data, np.uint8)
    return Side(name=IMAGES, start=place.start, end=place.end, array=array, counts=counts)


def images_of(sides: Iterable[Side]) -> tuple[Image, ...]:
    """Return the images among side arrays, in the order of their places, which count as the sides' do."""
    found = []
    for side in sides:
        if side.name != IMAGES or side.counts is None:
            continue
        firsts = np.flatnonzero(side.counts)
        ends = [*firsts[1:].tolist(), side.end - side.start]
        parts = np.split(side.array, np.cumsum(side.counts[firsts])[:-1])
        for first, end, part in zip(firsts.tolist(), ends, parts, strict=True):
            data = part.tobytes()
            found.append(Image(start=side.start + first, end=side.start + end, digest=digest_of(data), data=data))
    return tuple(sorted(found, key=lambda each: each.start))
