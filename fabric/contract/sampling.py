"""How a turn is sampled: every field, what it takes, and which seed a turn gets of its run's.

- The fields mean what vLLM's of the same names do (vllm/sampling_params.py), in its order: logit bias, penalties, then
  temperature, min_p, top_k, top_p; what is left is renormalised. Log-probabilities are of that distribution.
- FIELDS is the one table: checks of input, of environments' own settings and of rows, engines' refusals and
  docs/environments.md follow from it.
- Fields of RECORDED change no token: they ask for side arrays (sides.py).
- A stop text ends a turn with the first token after which the turn's decoded text contains it; the token is kept.
- A turn's seed follows from the run's seed and the turn's name alone. An attempt that starts anew, an agent that takes
  over, and another run that pushes the same group names under the same seed all ask for the same dice. The run's own
  name is left out, so that a run can be repeated under another one.

Drawing with a seed is the engines' (workers/engines/seeds.py), and so is finding stops (workers/engines/stops.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

import xxhash

from .errors import InputError
from .fields import WHOLE_MAX, Bound, check_types
from .ids import turn_id
from .limits import (
    END_ID_COUNT_MAX,
    GUIDED_BYTES_MAX,
    LOGIT_BIAS_COUNT_MAX,
    LOGIT_BIAS_MAX,
    LOGPROB_COUNT_MAX,
    PENALTY_MAX,
    REPETITION_MAX,
    REPETITION_MIN,
    STOP_COUNT_MAX,
    STOP_ID_COUNT_MAX,
    STOP_LENGTH_MAX,
    TEMPERATURE_MAX,
    TEMPERATURE_MIN,
)
from .text import SHOWN_MAX, did_you_mean
from .text import shown as shown

SEED_MAX = (1 << 63) - 1  # a signed 64-bit number, as JSON readers, torch and vLLM take it; -1 means "none" to vLLM
TOKEN_ID_MAX = (1 << 31) - 1
TURN_STOP_ID_COUNT_MAX = STOP_ID_COUNT_MAX + END_ID_COUNT_MAX
GUIDED = frozenset({"guided_json", "guided_regex", "guided_tag"})
PENALTIES = frozenset({"presence_penalty", "frequency_penalty", "repetition_penalty"})
CUTS = frozenset({"top_p", "top_k", "min_p"})
RECORDED = frozenset({"logprobs", "prompt_logprobs", "kept_tokens", "routed_experts"})
EVERYWHERE = frozenset({"temperature", "max_tokens", "stop_ids", "seed"})  # what every engine can do
RENAMED = {"stop_texts": "stop"}  # words of others, and of older environments


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a turn is sampled. On the wire a field that has its default is left out."""

    BOUNDS: ClassVar[dict[str, Bound]] = {
        "temperature": (0, TEMPERATURE_MAX),
        "top_p": (0, 1),
        "top_k": (0, TOKEN_ID_MAX),
        "min_p": (0, 1),
        "presence_penalty": (-PENALTY_MAX, PENALTY_MAX),
        "frequency_penalty": (-PENALTY_MAX, PENALTY_MAX),
        "repetition_penalty": (REPETITION_MIN, REPETITION_MAX),
        "logprobs": (0, LOGPROB_COUNT_MAX),
        "prompt_logprobs": (0, LOGPROB_COUNT_MAX),
    }

    temperature: float = 1.0
    """Divides the logits; 0: greedy, the likeliest token, and top_p, top_k and min_p cut nothing."""
    top_p: float = 1.0
    """Keeps the likeliest tokens that together have this probability, at least one."""
    top_k: int = 0
    """Keeps so many of the likeliest tokens, and those as likely as the last of them; 0: all."""
    min_p: float = 0.0
    """Keeps tokens with at least this fraction of the likeliest one's probability."""
    presence_penalty: float = 0.0
    """Is taken off the logit of every token that the turn has made; earlier claims of it count."""
    frequency_penalty: float = 0.0
    """Is taken off the logit of every token as often as the turn has made it; earlier claims of it count."""
    repetition_penalty: float = 1.0
    """Divides the logit, where it is above 0, of every token of prompt and turn, and multiplies it below."""
    max_tokens: int = 16
    """Tokens after which the turn ends as "length"."""
    stop: tuple[str, ...] = ()
    """Texts that end the turn, also across tokens; special tokens are no text, but one may be named by its text."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end the turn."""
    seed: int | None = None
    """With one, tokens depend on prompt, weights and seed alone, not on what else runs; none: fresh dice."""
    logit_bias: dict[int, float] = field(default_factory=dict)
    """Is added to the logits of these tokens, before all else."""
    guided_json: str = ""
    """JSON schema, as a dict or as text: the turn's text is JSON that fits it, then the model's end of sequence."""
    guided_regex: str = ""
    """Regular expression that the turn's whole text matches, then the model's end of sequence."""
    guided_tag: str = ""
    """Structural tag of xgrammar and vLLM, as a dict or as text: what the turn is, then the model's end of sequence."""
    logprobs: int = 0
    """Records so many of the likeliest tokens beside each token that is made (top_ids, top_logprobs)."""
    prompt_logprobs: int | None = None
    """Records each prompt token's log-probability, and so many likeliest ones (prompt_logprobs, prompt_top_ids, …)."""
    kept_tokens: bool = False
    """Records, for each token that is made, all that top_p, top_k and min_p left to draw from (kept_ids)."""
    routed_experts: bool = False
    """Records which experts each layer chose, for the tokens of prompt and turn (routed_experts)."""

    def row(self) -> dict[str, Any]:
        """Return the fields that are not at their defaults, as plain values that JSON carries."""
        found = {
            name: value
            for value, (name, default) in zip(_values(self), DEFAULTS, strict=True)
            if value is not default and value != default
        }
        if "logit_bias" in found:
            found["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        return found

    @property
    def is_guided(self) -> bool:
        """True if a grammar decides which tokens may come."""
        return bool(self.guided_json or self.guided_regex or self.guided_tag)

    @property
    def keeps_some(self) -> bool:
        """True if tokens are cut off, and those that are left recorded: where none is, there is nothing to say."""
        is_cut = self.top_p < 1 or self.top_k > 0 or self.min_p > 0
        return self.kept_tokens and self.temperature > 0 and is_cut


DEFAULTS: tuple[tuple[str, Any], ...] = tuple(
    (each.name, each.default if each.default is not MISSING else {}) for each in fields(Sampling)
)
_values = attrgetter(*(name for name, _ in DEFAULTS))  # all at once: a turn's are read several times


def given_fields(sampling: Sampling) -> list[str]:
    """Name the fields whose values are not exactly their defaults, in the order of FIELDS: 1 and True are not alike."""
    return [
        name
        for value, (name, default) in zip(_values(sampling), DEFAULTS, strict=True)
        if value is not default and (type(value) is not type(default) or value != default)
    ]


class Field(NamedTuple):
    """takes: which values, in words. is_fine: whether a value is one of them. plain: the value as JSON carries it."""

    takes: str
    is_fine: Callable[[Any], bool]
    plain: Callable[[Any], Any] = lambda value: value


def is_seed(value: Any) -> bool:
    """Tell whether `value` is a whole number in [0, 2**63)."""
    return is_whole(value) and 0 <= value <= SEED_MAX


def is_whole(value: Any) -> bool:
    """Tell whether `value` is an int, and not a truth value."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any, least: float, most: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most  # NaN is nowhere


def _between(least: float, most: float) -> Field:
    return Field(f"a number from {least:g} to {most:g}", lambda value: _is_number(value, least, most))


def _is_stop(value: Any) -> bool:
    return (
        isinstance(value, (list, tuple))
        and len(value) <= STOP_COUNT_MAX
        and all(isinstance(text, str) and 0 < len(text) <= STOP_LENGTH_MAX and _is_unicode(text) for text in value)
    )


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _is_token(value: Any) -> bool:
    return is_whole(value) and 0 <= value <= TOKEN_ID_MAX


def _is_stop_ids(value: Any, count_max: int = STOP_ID_COUNT_MAX) -> bool:
    return isinstance(value, (list, tuple)) and len(value) <= count_max and all(map(_is_token, value))


def _token_of(key: Any) -> Any:
    """Read a token id of a JSON object's key, where it is one."""
    is_digits = isinstance(key, str) and len(key) <= len(str(TOKEN_ID_MAX)) and key.isascii() and key.isdigit()
    return int(key) if is_digits else key


def _is_logit_bias(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and len(value) <= LOGIT_BIAS_COUNT_MAX
        and all(
            _is_token(_token_of(key)) and _is_number(each, -LOGIT_BIAS_MAX, LOGIT_BIAS_MAX)
            for key, each in value.items()
        )
    )


def _schema_text(value: Any) -> str:
    """Return a JSON schema as text. Raises ValueError, TypeError, RecursionError: it is none."""
    if not isinstance(value, str):
        return json.dumps(value, allow_nan=False)
    if len(value) > GUIDED_BYTES_MAX or not isinstance(json.loads(value), dict):
        raise ValueError("no JSON object, or too long")
    return value


def _is_schema(value: Any) -> bool:
    try:
        text = _schema_text(value) if isinstance(value, (dict, str)) else ""
        return 0 < len(text.encode()) <= GUIDED_BYTES_MAX
    except (ValueError, TypeError, RecursionError):
        return False


def _is_regex(value: Any) -> bool:
    return isinstance(value, str) and _is_unicode(value) and 0 < len(value.encode()) <= GUIDED_BYTES_MAX


_KIB = f"{GUIDED_BYTES_MAX >> 10} KiB as UTF-8"
_PENALTY = _between(-PENALTY_MAX, PENALTY_MAX)
_FLAG = Field("true or false", lambda value: isinstance(value, bool))
_COUNT = Field(
    f"a whole number from 0 to {LOGPROB_COUNT_MAX}", lambda value: is_whole(value) and 0 <= value <= LOGPROB_COUNT_MAX
)
FIELDS: Mapping[str, Field] = {
    "temperature": Field(
        f"0 (greedy) or a number from {TEMPERATURE_MIN} to {TEMPERATURE_MAX:g}",
        lambda value: _is_number(value, TEMPERATURE_MIN, TEMPERATURE_MAX) or (_is_number(value, 0, 0)),
    ),
    "top_p": Field("a number above 0, up to 1", lambda value: _is_number(value, 0, 1) and value > 0),
    "top_k": Field("a whole number of at least 0 (0: all)", _is_token),
    "min_p": _between(0, 1),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": _between(REPETITION_MIN, REPETITION_MAX),
    "max_tokens": Field(
        f"a whole number from 1 to {WHOLE_MAX:,}", lambda value: is_whole(value) and 1 <= value <= WHOLE_MAX
    ),
    "stop": Field(
        f"a list of at most {STOP_COUNT_MAX} texts of 1 to {STOP_LENGTH_MAX:,} characters, no lone surrogates, "
        'such as ["\\n"]',
        _is_stop,
        list,
    ),
    "stop_ids": Field(f"a list of at most {STOP_ID_COUNT_MAX:,} token ids", _is_stop_ids, list),
    "seed": Field(f"a whole number from 0 to {SEED_MAX}", is_seed),
    "logit_bias": Field(
        f"a dict of at most {LOGIT_BIAS_COUNT_MAX:,} token ids, each with a number from -{LOGIT_BIAS_MAX:g} to "
        f"{LOGIT_BIAS_MAX:g}",
        _is_logit_bias,
        lambda value: {str(_token_of(key)): bias for key, bias in value.items()},
    ),
    "guided_json": Field(f"a JSON schema as a dict or as text, of at most {_KIB}", _is_schema, _schema_text),
    "guided_regex": Field(f"a regular expression of at most {_KIB}", _is_regex),
    "guided_tag": Field(f"a structural tag as a dict or as text, of at most {_KIB}", _is_schema, _schema_text),
    "logprobs": _COUNT,
    "prompt_logprobs": _COUNT,
    "kept_tokens": _FLAG,
    "routed_experts": _FLAG,
}
"""Every field: what it takes. That token ids are the model's, its engine looks at."""


def is_field(name: str, value: Any) -> bool:
    """Tell whether a field takes a value; its default is always fine."""
    return _is_default(name, value) or FIELDS[name].is_fine(value)


def check_field(name: str, value: Any, where: str) -> None:
    """Require that a field takes a value.

    Raises:
        InputError: names the field, the value (cut) and the expectation.
    """
    if not is_field(name, value):
        raise InputError(f"{where}: {name} is {shown(value)}, expected {FIELDS[name].takes}", name=name)


def _is_default(name: str, value: Any) -> bool:
    default = _DEFAULT[name]
    is_empty = isinstance(value, (list, tuple)) and not value and default == ()
    return is_empty or (type(value) is type(default) and bool(value == default))


_DEFAULT: dict[str, Any] = dict(DEFAULTS)


def check_sampling(given: Mapping[str, Any], where: str, *, others: Iterable[str] = ()) -> dict[str, Any]:
    """Settings of sampling as plain values that JSON carries, so that no worker finds out later what is wrong.

    others: names beside the fields that may be there; their values are left as they are.

    Raises:
        InputError: names the setting that does not exist and the nearest that does, or the value and the expectation.
    """
    known, found = {*FIELDS, *others}, dict[str, Any]()
    for name, value in given.items():
        if name not in known:
            raise InputError(f"{where} has no {shown(name)}: {_nearest(name, known)}", name=str(name)[:SHOWN_MAX])
        if name in FIELDS:
            check_field(name, value, where)
        is_plain = name not in FIELDS or _is_default(name, value)
        found[name] = value if is_plain else FIELDS[name].plain(value)
    given_guides = sorted(name for name in GUIDED if found.get(name))
    if len(given_guides) > 1:
        raise InputError(f"{where}: {' and '.join(given_guides[:2])} are both given: leave one of them out")
    return found


def _nearest(name: Any, known: Iterable[str]) -> str:
    if name in RENAMED:
        return f"its name is {RENAMED[name]!r}, a list of texts, each of which ends a turn as a whole"
    return did_you_mean(str(name), known)


def sampling_from(row: dict[str, Any]) -> Sampling:
    """Sampling of plain values as they arrive in metadata, or as `check_sampling` gives them.

    Raises:
        WireError, InputError: a field is of another type or holds other than it may.
    """
    check_types(Sampling, tuple(row), tuple(row.values()), "TurnJob.sampling")
    for name, value in row.items():
        if name != "stop_ids" or not _is_stop_ids(value, TURN_STOP_ID_COUNT_MAX):
            check_field(name, value, "sampling")
    made: dict[str, Any] = row | {name: tuple(row[name]) for name in ("stop", "stop_ids") if name in row}
    if "logit_bias" in row:
        made["logit_bias"] = {int(key): bias for key, bias in row["logit_bias"].items()}
    return Sampling(**made)


def with_ends(sampling: Sampling, ends: Iterable[int]) -> Sampling:
    """Add the tokens that end the model's answers to those that end a turn, each once.

    Raises:
        InputError: they are more than a turn may have.
    """
    ids = tuple(dict.fromkeys((*sampling.stop_ids, *ends)))
    if len(ids) > TURN_STOP_ID_COUNT_MAX:
        raise InputError(
            f"sampling: stop_ids has {len(ids):,} token ids with those that end the model's answers, the limit is "
            f"{TURN_STOP_ID_COUNT_MAX:,}: leave some out",
            name="stop_ids",
        )
    return replace(sampling, stop_ids=ids)


def turn_seed(run_seed: int, trajectory_id: str, turn_index: int) -> int:
    """Derive the seed of one turn, in [0, 2**63): XXH3-64 of "<run seed>/<turn id>" as text, without its lowest bit.

    A turn id is <group id>.<index in the group>.<turn index>. Among a million turns two share a seed with a probability
    of 5e-8 (birthday bound over 63 bits).
    """
    return xxhash.xxh3_64_intdigest(f"{run_seed}/{turn_id(trajectory_id, turn_index)}".encode()) >> 1
