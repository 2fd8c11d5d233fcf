"""Bearer keys of the api: made here, and kept only as SHA-256.

- A key made here has 256 random bits, so nobody finds it by trying, and a plain fast hash protects it as well as a slow
  one would; slow hashes are for passwords that people choose.
- A key is shown once, when it is made. Files, settings and memory hold its hash.
- Comparing takes a time that says nothing about the hashes.

A keys file has one line per key, `read|control SHA-256 name`, and may hold blank lines and comments (#).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ...fabric.contract.errors import ConfigError
from ...fabric.contract.ids import check_name
from ...fabric.contract.limits import KEYS_FILE_BYTES_MAX
from ...fabric.host.directories import write_private

KEY_LENGTH_MIN = 16  # shorter ones can be tried out
KEY_BYTES = 32
HASHED = re.compile(r"sha256:[0-9a-f]{64}\Z")
RIGHTS = ("read", "control")
HEADER = "# Keys of the rollfab api: right, SHA-256 of the key, name. Made by `rollfab api keys new`.\n"


@dataclass(frozen=True, kw_only=True)
class KeyRow:
    """A key as a file holds it. right: read, or control (which includes read)."""

    right: str
    hashed: str
    name: str


def new_key() -> str:
    """Make a key that nobody can guess; its beginning lets scanners find it where it should not be."""
    return f"rfk_{secrets.token_urlsafe(KEY_BYTES)}"


def hash_key(key: str) -> str:
    """Return `sha256:` and the hash of a key; what has that form already stays as it is.

    Raises:
        ConfigError: it could be guessed, or could not be sent in a header. The text does not repeat it.
    """
    if HASHED.match(key):
        return key
    if len(key) < KEY_LENGTH_MIN or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"an api key of {len(key)} characters is refused: use at least {KEY_LENGTH_MIN} letters, digits or "
            "signs without blanks; `rollfab api keys new NAME` makes one"
        )
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def place_among(key: str, hashes: Iterable[str]) -> int | None:
    """Find which of these hashes a key that was sent has; None: none. Looks at all of them."""
    sent = f"sha256:{hashlib.sha256(key.encode('utf-8', 'surrogateescape')).hexdigest()}"
    found = None
    for place, each in enumerate(hashes):
        found = place if hmac.compare_digest(sent, each) else found
    return found


def parse_keys(data: bytes, where: str) -> list[KeyRow]:
    """Read the rows of a keys file.

    Raises:
        ConfigError: names the line, and does not repeat it: it may hold a key that was put there by mistake.
    """
    if len(data) > KEYS_FILE_BYTES_MAX:
        raise ConfigError(f"{where} has {len(data):,} bytes, a keys file at most {KEYS_FILE_BYTES_MAX:,}")
    rows: list[KeyRow] = []
    for number, line in enumerate(data.decode("utf-8", "replace").split("\n"), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 3 or words[0] not in RIGHTS or not HASHED.match(f"sha256:{words[1]}"):
            raise ConfigError(
                f"{where}, line {number} is not `read|control SHA-256 name`: `rollfab api keys new NAME` writes it"
            )
        rows.append(KeyRow(right=words[0], hashed=f"sha256:{words[1]}", name=words[2]))
    return rows


def read_keys_file(path: Path) -> list[KeyRow]:
    """Read the keys of a file.

    Raises:
        ConfigError: it cannot be read, other users may write to it, or a line is none of ours.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(KEYS_FILE_BYTES_MAX + 1)
    except OSError as error:
        is_missing = isinstance(error, FileNotFoundError)
        make = f"`rollfab api keys new NAME --file {path}` makes it"
        control = f"`rollfab api keys new NAME --control --file {path}` one whose key may act, as a gateway's must"
        advice = f": {make}, {control}" if is_missing else ""
        raise ConfigError(f"the keys file {path} cannot be read: {error.strerror}{advice}") from error
    if mode & 0o022:
        raise ConfigError(f"the keys file {path} can be written by other users: chmod 600 {path}", path=str(path))
    return parse_keys(data, f"the keys file {path}")


def add_key(path: Path, name: str, right: str) -> str:
    """Make a key, add its hash to a file (made if missing, for its owner alone), and return it: the only time.

    Raises:
        ConfigError: the name is taken or not one, or the file cannot be written.
    """
    assert right in RIGHTS
    check_name("key", name)
    rows = read_keys_file(path) if path.exists() else []
    if any(row.name == name for row in rows):
        raise ConfigError(f"the keys file {path} has a key {name!r} already: drop it first, or use another name")
    key = new_key()
    _write(path, [*rows, KeyRow(right=right, hashed=hash_key(key), name=name)])
    return key


def drop_key(path: Path, name: str) -> None:
    """Remove a key from a file; running apis know it until they are started again.

    Raises:
        ConfigError: there is no such key, or the file cannot be written.
    """
    rows = read_keys_file(path)
    if all(row.name != name for row in rows):
        raise ConfigError(f"the keys file {path} has no key {name!r}")
    _write(path, [row for row in rows if row.name != name])


def _write(path: Path, rows: list[KeyRow]) -> None:
    lines = [f"{row.right} {row.hashed.removeprefix('sha256:')} {row.name}\n" for row in rows]
    try:
        write_private(path, HEADER + "".join(lines))
    except OSError as error:
        raise ConfigError(f"the keys file {path} cannot be written: {error.strerror}") from error
