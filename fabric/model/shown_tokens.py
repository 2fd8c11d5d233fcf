"""Tokens as text, for people who look: the tokenizers of models, by name, without an engine's libraries."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..contract.errors import ConfigError
from ..contract.records import Int32
from ..contract.text import printable
from .presets import find_model, is_preset
from .tokenizer import CharTokenizer, Tokenizer

FILE = "tokenizer.json"
MODEL_COUNT_MAX = 16  # whose tokenizers are kept: one takes some 10 MB
REASON_LENGTH_MAX = 300


class FileTokenizer:
    """The tokenizer of a tokenizer.json. Needs the tokenizers library, which it imports."""

    bos_id: int | None = None
    eos_id: int | None = None

    def __init__(self, path: Path) -> None:
        """Raises whatever the library raises of a file that it cannot read."""
        from tokenizers import Tokenizer as Library

        self._tokenizer: Any = Library.from_file(str(path))

    @cached_property
    def vocabulary_size(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    @cached_property
    def special_ids(self) -> Mapping[str, int]:
        added = self._tokenizer.get_added_tokens_decoder().items()
        return {token.content: int(number) for number, token in added if token.special}

    def is_byte(self, token: int) -> bool:
        """Not known: nobody who only looks asks."""
        return False

    def encode(self, text: str) -> Int32:
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        text: str = self._tokenizer.decode(list(map(int, ids)), skip_special_tokens=True)
        return text


class Tokenizers:
    """Tokenizers by model, each loaded once; what has none, or none here, has a reason instead."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[Tokenizer | None, str | None]] = {}

    async def of(self, model: str) -> tuple[Tokenizer | None, str | None]:
        """Return a model's tokenizer, or None and why there is none. A thread loads it: that may take a second."""
        if model not in self._found:
            found = await asyncio.to_thread(load_shown, model)
            while len(self._found) >= MODEL_COUNT_MAX:
                self._found.pop(next(iter(self._found)))
            self._found[model] = found
        return self._found[model]


def load_shown(model: str) -> tuple[Tokenizer | None, str | None]:
    """Load a model's tokenizer from this machine; nothing is downloaded. Or return None, and why there is none."""
    if is_preset(model):
        return CharTokenizer(), None
    try:
        place = Path(find_model(model).name) / FILE
        path = place if place.is_file() else _cached(model)
        if path is None:
            return None, f"token ids only: this machine has no {FILE} of model {model!r:.100}"
        return FileTokenizer(path), None
    except ConfigError as error:
        return None, f"token ids only: {error.message}"
    except ImportError:
        return None, "token ids only: the tokenizers library is not installed here: pip install tokenizers"
    except Exception as error:  # noqa: BLE001 - a library's, of a model's files: ids are shown without texts
        return None, f"token ids only: {printable(repr(error))[:REASON_LENGTH_MAX]}"


def _cached(model: str) -> Path | None:
    """Find the file of a hub's model in the hub library's own cache."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, FILE)
    return Path(found) if isinstance(found, str) else None
