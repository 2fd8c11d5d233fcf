"""Stop texts over the borders of tokens: against decoding everything again after every token."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollfab.fabric.contract.errors import ConfigError
from rollfab.fabric.model.tokenizer import CharTokenizer, Tokenizer
from rollfab.workers.engines.model_tokenizer import find_tokenizer, load_tokenizer
from rollfab.workers.engines.stops import RUN_MAX, Pieces, StopMatcher
from tests.support.tokenizer_files import SPECIAL, WORDS, byte_fallback, byte_level, save
from tests.support.tried import tried


@pytest.fixture(scope="module", params=[CharTokenizer, byte_level, byte_fallback], ids=lambda kind: kind.__name__)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    made = request.param()
    if isinstance(made, CharTokenizer):
        return made
    place = tmp_path_factory.mktemp("tokenizer")
    save(made, place)
    return load_tokenizer(str(place))


def naive(tokenizer: Tokenizer, stops: list[str], tokens: list[int]) -> int | None:
    special = {tokenizer.special_ids[stop] for stop in stops if stop in tokenizer.special_ids}
    for count in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:count])
        if tokens[count - 1] in special or any(stop in text for stop in stops):
            return count
    return None


@settings(max_examples=tried(200), deadline=None)
@given(data=st.data())
def test_a_turn_ends_where_decoding_everything_again_would_end_it(tokenizer: Tokenizer, data: st.DataObject) -> None:
    # Given tokens of any kind, more of them pieces of characters than a model would make, and stops out of their text
    count = tokenizer.vocabulary_size
    pieces = Pieces(tokenizer)
    opened = [token for token in range(count) if pieces.closed(token) is None]
    some = st.one_of(st.integers(0, count - 1), st.integers(max(0, count - 40), count - 1), st.sampled_from(opened))
    tokens = data.draw(st.lists(some, max_size=30))
    text = tokenizer.decode(tokens) or "a"
    begins = st.integers(0, len(text) - 1)
    cuts = st.tuples(begins, st.integers(1, 6)).map(lambda cut: text[cut[0] : cut[0] + cut[1]])
    stops = data.draw(st.lists(st.one_of(cuts, st.sampled_from(WORDS + SPECIAL), st.text(min_size=1)), max_size=4))

    # Then it ends there, however the tokens come
    wanted = naive(tokenizer, stops, tokens)
    assert StopMatcher(pieces, stops).feed(tokens) == wanted
    cut = data.draw(st.integers(0, len(tokens)))
    matcher = StopMatcher(pieces, stops)
    first = matcher.feed(tokens[:cut])
    rest = matcher.feed(tokens[cut:]) if first is None else None
    assert (first if first is not None else None if rest is None else cut + rest) == wanted

    # And a token that is said to end a turn by itself does so wherever it comes
    for token in StopMatcher(pieces, stops).token_ids:
        assert naive(tokenizer, stops, [token]) == 1
        assert naive(tokenizer, stops, [*tokens, token]) is not None


@settings(max_examples=tried(200), deadline=None)
@given(
    text=st.text(alphabet="ab .\nstopé€🤣中文", max_size=40),
    stop=st.text(alphabet="ab .\nsé€🤣", min_size=1, max_size=5),
)
def test_a_text_that_was_encoded_ends_where_the_stop_does(tokenizer: Tokenizer, text: str, stop: str) -> None:
    tokens = tokenizer.encode(text).tolist()
    assert StopMatcher(Pieces(tokenizer), [stop]).feed(tokens) == naive(tokenizer, [stop], tokens)


def test_a_special_token_is_a_stop_by_its_text_and_no_text_besides(tokenizer: Tokenizer) -> None:
    if isinstance(tokenizer, CharTokenizer):
        assert not tokenizer.special_ids and StopMatcher(Pieces(tokenizer), ["<|end|>"]).token_ids == []
        return
    end, (a, b) = tokenizer.special_ids["<|end|>"], tokenizer.encode("ab").tolist()[-2:]
    assert StopMatcher(Pieces(tokenizer), ["<|end|>"]).feed([a, b, end, a]) == 3
    assert StopMatcher(Pieces(tokenizer), ["<|end|>"]).token_ids == [end]
    assert StopMatcher(Pieces(tokenizer), ["ab"]).feed([a, end, b]) == 3


def test_bytes_without_end_cost_no_more_than_a_run_of_them(tokenizer: Tokenizer) -> None:
    pieces = Pieces(tokenizer)
    opened = [token for token in range(tokenizer.vocabulary_size) if pieces.closed(token) is None]
    matcher = StopMatcher(pieces, ["stop"])
    longest = 0
    for token in opened[-1:] * (6 * RUN_MAX):
        assert matcher.feed([token]) is None
        longest = max(longest, len(matcher._open))
    assert longest <= 2 * RUN_MAX
    assert matcher.feed(tokenizer.encode("a stop").tolist()) is not None


def test_a_stop_of_one_character_is_a_token_that_the_engine_may_know() -> None:
    tokenizer = CharTokenizer()
    assert StopMatcher(Pieces(tokenizer), ["\n", "ab"]).token_ids == tokenizer.encode("\n").tolist()


def test_a_directory_without_a_tokenizers_files_has_none_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')  # of which the library makes an empty one
    found, reason = find_tokenizer(str(tmp_path))
    assert found is None and "has no tokenizer" in reason and str(tmp_path) in reason
    with pytest.raises(ConfigError, match=r"that directory holds no tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert find_tokenizer(str(tmp_path))[0] is None
    with pytest.raises(ConfigError, match="its files hold no vocabulary"):
        load_tokenizer(str(tmp_path))
