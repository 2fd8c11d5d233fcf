"""The character tokenizer and the presets that use it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfab.fabric.contract.errors import ConfigError
from rollfab.fabric.model.presets import PRESETS, is_preset, model_config
from rollfab.fabric.model.tokenizer import CharTokenizer, Tokenizer

tokenizer: Tokenizer = CharTokenizer()
KNOWN = "\n" + "".join(map(chr, range(32, 127)))


@given(st.text(alphabet=KNOWN))
def test_known_text_comes_back_as_it_was(text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32 and ids.shape == (len(text),)
    assert tokenizer.decode(ids) == text


@given(st.text())
def test_any_text_has_one_id_per_character(text: str) -> None:
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    for identifier, character in zip(ids, text, strict=True):
        assert (identifier == CharTokenizer.unknown_id) == (character not in KNOWN)


def test_every_character_has_an_id_of_its_own_that_no_special_has() -> None:
    ids = set(tokenizer.encode(KNOWN).tolist())
    assert len(ids) == len(KNOWN) == 96
    assert not ids & {CharTokenizer.pad_id, CharTokenizer.bos_id, CharTokenizer.eos_id, CharTokenizer.unknown_id}
    assert max(ids) < tokenizer.vocabulary_size


def test_every_id_has_a_text_and_specials_have_none() -> None:
    assert tokenizer.decode([CharTokenizer.pad_id, CharTokenizer.bos_id, CharTokenizer.eos_id]) == ""
    assert tokenizer.decode([CharTokenizer.unknown_id, tokenizer.vocabulary_size - 1]) == "��"
    assert len(tokenizer.decode(range(tokenizer.vocabulary_size))) == tokenizer.vocabulary_size - 3


def test_a_lone_surrogate_is_only_an_unknown_character() -> None:
    assert tokenizer.encode("\ud800é").tolist() == [CharTokenizer.unknown_id] * 2


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_copy_that_fits_the_tokenizer(name: str) -> None:
    config = model_config(name)
    assert is_preset(name) and config["vocab_size"] == tokenizer.vocabulary_size
    config["vocab_size"] = 1
    assert model_config(name)["vocab_size"] == tokenizer.vocabulary_size


def test_a_name_that_is_no_preset_says_which_there_are() -> None:
    assert not is_preset("org/name")
    with pytest.raises(ConfigError, match="tiny"):
        model_config("org/name")
