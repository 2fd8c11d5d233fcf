"""Which tokenizer a model has: the character tokenizer for presets, else the model's own, loaded when asked for."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from typing import Any

import numpy as np

from ...fabric.contract.errors import ConfigError
from ...fabric.contract.models import is_path, is_preset
from ...fabric.contract.records import Int32
from ...fabric.contract.tokenizer import CharTokenizer, Tokenizer


class HubTokenizer:
    """A tokenizer from a path or hub name. Needs the transformers library, which it imports.

    may_download: else it must lie on this machine, in a directory or in the library's own cache.
    """

    def __init__(self, model: str, *, may_download: bool = False) -> None:
        from transformers import AutoTokenizer

        is_here = is_path(model) or os.path.isdir(model)
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                model, trust_remote_code=False, local_files_only=is_here or not may_download
            )
        except (OSError, ValueError) as error:
            if not (is_here or may_download):
                raise ConfigError(
                    f"model {model!r} is not on this machine, and may not be downloaded for a run that names it: start "
                    f"the agent with --allow-hub {shlex.quote(model)}, or name the directory of a model",
                    model=model,
                ) from error
            raise ConfigError(
                f"model {model!r} has no tokenizer that can be loaded: {error}. Give a preset, a path or a hub name",
                model=model,
            ) from error

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

    def encode(self, text: str) -> Int32:
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        text: str = self._tokenizer.decode(list(map(int, ids)), skip_special_tokens=True)
        return text


def load_tokenizer(model: str, *, may_download: bool = False) -> Tokenizer:
    """The tokenizer of a preset, path or hub name; a hub's is downloaded where that is allowed.

    Raises:
        ConfigError: it can not be loaded.
    """
    return CharTokenizer() if is_preset(model) else HubTokenizer(model, may_download=may_download)
