"""Reads a configuration file: TOML, with a table for each role, whose keys are those of the role's options.

The whole file is checked, whichever role reads it: a table that is misspelt would else be no table of anybody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...fabric.contract.errors import ConfigError
from ...fabric.contract.text import did_you_mean, told
from ...fabric.host.files import parse_toml, read_regular
from ...fabric.host.options import Described, describe
from ..cli.arguments import find_secret
from .options import TABLES

Tables = dict[str, dict[str, Any]]
KINDS: Mapping[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,)}  # else a text
SWITCHES = dict.fromkeys("1 true t yes y on".split(), True) | dict.fromkeys("0 false f no n off".split(), False)
READERS: Mapping[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "bool": lambda word: SWITCHES[word.lower()],
}
CONFIG_BYTES_MAX = 1 << 20
FAULT_COUNT = 8  # named at once
WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false"}


def read_config(path: Path) -> Tables:
    """Read a configuration file; returns its tables, by role.

    Raises:
        ConfigError: names the file, and each key with what is wrong with it.
    """
    try:
        tables = parse_toml(read_regular(path, CONFIG_BYTES_MAX))
    except ConfigError as error:
        raise ConfigError(f"{error.message}: name a TOML file", option="--config") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", option="--config") from error
    except ValueError as error:  # as TOML, or as text
        raise ConfigError(f"{path} is no TOML: {error}", option="--config") from error
    faults = list(_faults_of(tables))
    if faults:
        said = [text for _, text in faults[:FAULT_COUNT]]
        more = [f"and {len(faults) - FAULT_COUNT} more"] if len(faults) > FAULT_COUNT else []
        raise ConfigError(f"{path}: {'; '.join(said + more)}", option=faults[0][0])
    return tables


def _faults_of(tables: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """List what is wrong with the tables of a file: the role or key, and the fault."""
    for role, table in tables.items():
        if role not in TABLES:
            yield role, f"[{role}] is no role: {did_you_mean(role, TABLES)}"
        elif not isinstance(table, dict):
            yield role, f"{role} is no table: write [{role}], and its settings below"
        else:
            known = {each.key: each for each in describe(TABLES[role])}
            faults = ((key, fault_of(key, value, known)) for key, value in table.items())
            yield from ((key, f"[{role}] {key} {fault}") for key, fault in faults if fault)


def fault_of(key: str, value: Any, known: Mapping[str, Described]) -> str:
    """Say what is wrong with a setting of a table with known keys; empty: nothing. No secret is repeated."""
    values = value if isinstance(value, list) else [value]
    words = [each for each in values if isinstance(each, str)]
    secret = find_secret(("--" + key.replace("_", "-"), *words))
    if secret is not None:
        instead = secret.instead.removesuffix(", or in a file")
        return f"would keep {secret.what} in a file that others may read: give it {instead}"
    if key not in known:
        return f"is no setting of it: {did_you_mean(key, [name for name in known if name != 'server_key'])}"
    return fault_of_value(known[key], value, is_open=True)


def fault_of_variable(known: Described, text: str) -> str:
    """Say what is wrong with an environment variable, as `fault_of`: lists are separated by spaces."""
    value: Any = text.split() if known.is_list else text
    with suppress(ValueError, KeyError):
        value = READERS[known.type_name](text)
    return fault_of_value(known, value, is_open=False)


def fault_of_value(known: Described, value: Any, *, is_open: bool) -> str:
    """Say what is wrong with a value, as `fault_of`. is_open: others can read it where it stands."""
    said, kind = known.option, known.type_name
    if known.is_list:
        is_right = isinstance(value, list) and all(isinstance(each, str) for each in value)
        wanted = "a list of texts"
    else:
        is_right = isinstance(value, KINDS.get(kind, (str,))) and isinstance(value, bool) == (kind == "bool")
        wanted = WORDS.get(kind, "a text")
    if not is_right:
        return f"is {told(value)}, expected {wanted}"
    if value == "":
        return "is empty: leave it out, and it has its default"
    if said.least is not None and not value >= said.least:
        return f"is {value!r}, expected {said.least} or more"
    if said.most is not None and not value <= said.most:
        return f"is {value!r}, expected {said.most} or less"
    if said.choices and value not in said.choices:
        return f"is {value!r}: {did_you_mean(value, said.choices)}"
    try:
        for check in (said.check, said.check_open if is_open else None):
            if check is not None:
                check(value)
    except ConfigError as error:
        return f"cannot be: {error}"
    return ""
