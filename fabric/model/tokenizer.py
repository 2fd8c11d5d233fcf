"""Text to token ids and back: the protocol, and the tokenizer of the model presets.

- Environments make prompts of text and read text from completions; what the fabric carries are always ids, and no
  completion is ever encoded again.
- Encoding adds no special tokens; whoever wants one puts the id there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar, Protocol

import numpy as np

from ..contract.records import Int32


class Tokenizer(Protocol):
    """The calls that an environment may make of a model's tokenizer."""

    @property
    def vocabulary_size(self) -> int:
        """Ids are in [0, vocabulary_size)."""
        ...

    @property
    def bos_id(self) -> int | None:
        """The id that starts a sequence, if the model has one."""
        ...

    @property
    def eos_id(self) -> int | None:
        """The id that ends a sequence, if the model has one."""
        ...

    @property
    def special_ids(self) -> Mapping[str, int]:
        """The tokens that decoding leaves out, by the text that names them."""
        ...

    def is_byte(self, token: int) -> bool:
        """Tell whether a token is one byte of a character that the vocabulary lacks: its neighbours decide its text."""
        ...

    def encode(self, text: str) -> Int32:
        """Return the ids of a text, int32 (T,), with no special tokens added."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; special tokens become nothing."""
        ...


class CharTokenizer:
    """One id per character: newline and printable ASCII. Made for the presets, whose every prompt fits in it.

    Ids: 0 pad, 1 bos, 2 eos, 3 any other character, 4 newline, 5 to 99 the characters from space to tilde. The
    vocabulary is rounded up to a multiple of 8 because matrix kernels prefer that; ids 100 to 103 mean nothing, and
    a model that samples one anyway is shown as the replacement character, like id 3.
    """

    pad_id: ClassVar[int] = 0
    bos_id: ClassVar[int] = 1
    eos_id: ClassVar[int] = 2
    unknown_id: ClassVar[int] = 3
    vocabulary_size: ClassVar[int] = 104
    special_ids: ClassVar[Mapping[str, int]] = {}

    def __init__(self) -> None:
        characters = "\n" + "".join(map(chr, range(ord(" "), ord("~") + 1)))
        first_id = self.unknown_id + 1
        self._id_of_code: Int32 = np.full(129, self.unknown_id, dtype=np.int32)  # 128 stands for every code above ASCII
        for index, character in enumerate(characters):
            self._id_of_code[ord(character)] = first_id + index
        texts = ["", "", "", "�", *characters]
        self._text_of_id = texts + ["�"] * (self.vocabulary_size - len(texts))

    def is_byte(self, token: int) -> bool:
        """None is."""
        return False

    def encode(self, text: str) -> Int32:
        """Return the ids of a text, int32 (len(text),); characters outside the vocabulary become `unknown_id`."""
        codes = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")
        ids: Int32 = self._id_of_code[np.minimum(codes, 128)]
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids. An id outside the vocabulary is a programmer error."""
        texts = self._text_of_id
        numbers = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        assert all(0 <= number < self.vocabulary_size for number in numbers), "id outside the vocabulary"
        return "".join([texts[number] for number in numbers])
