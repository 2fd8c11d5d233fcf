"""Finds wheels for another machine: in a directory, or in an index by pip; only those that are locked."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .parts import PYTHON

GLIBC = range(17, 40)  # manylinux_2_17 to 2_39
PLATFORMS = [*(f"manylinux_2_{minor}_x86_64" for minor in reversed(GLIBC)), "manylinux2014_x86_64", "linux_x86_64"]
PIN = re.compile(
    r"^([\w.-]+)==([^\s;\\+]+)\S*(?: ;[^\\\n]*)?(?: \\)?((?:\s+--hash=sha256:[0-9a-f]{64}(?: \\)?)*)", re.MULTILINE
)
HASH = re.compile(r"sha256:([0-9a-f]{64})")
FETCH_S = 600
MODES = {True: 0o755, False: 0o644}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """A lock file: versions by name, and the SHA-256 of every file of each."""

    versions: dict[str, str]
    hashes: dict[str, frozenset[str]]


def read_lock(path: Path) -> Lock:
    found = [(_canonical(name), version, rows) for name, version, rows in PIN.findall(path.read_text("utf-8"))]
    return Lock(
        versions={name: version for name, version, _ in found},
        hashes={name: frozenset(HASH.findall(rows)) for name, _, rows in found},
    )


class Wheels:
    """Finds wheels. directory: where they lie, and where those of the index come to. index: URL; None: none."""

    def __init__(self, directory: Path, index: str | None = None) -> None:
        self._directory = directory
        self._index = index

    def find(self, name: str, version: str, hashes: frozenset[str] = frozenset()) -> tuple[Path | None, str]:
        """Find the wheel for the machine, or None and why there is none. hashes: one must be its; empty: any."""
        found = self._lying(name, version)
        if found is None and self._index is not None:
            why = self._fetch(name, version)
            found = self._lying(name, version)
            if found is None:
                return None, why
        if found is None:
            return None, f"no wheel of it for Python {PYTHON[0]}.{PYTHON[1]} lies in {self._directory}"
        if hashes and digest_of(found) not in hashes:
            return None, f"{found.name} is not the file that is locked"
        return found, ""

    def _lying(self, name: str, version: str) -> Path | None:
        from packaging.utils import InvalidWheelFilename, parse_wheel_filename

        best: tuple[int, Path] | None = None
        order = {str(tag): place for place, tag in enumerate(_tags())}
        for path in sorted(self._directory.glob("*.whl")):
            try:
                own, own_version, _, tags = parse_wheel_filename(path.name)
            except InvalidWheelFilename:
                continue
            places = [order[str(tag)] for tag in tags if str(tag) in order]
            if own == name and own_version.base_version == version.split("+")[0] and places:
                best = min(best or (min(places), path), (min(places), path))
        return best[1] if best else None

    def _fetch(self, name: str, version: str) -> str:
        """Have pip bring a wheel; returns what pip said."""
        words = [
            sys.executable,
            "-m",
            "pip",
            "--isolated",
            "--disable-pip-version-check",
            "download",
            "-qq",
            "--no-deps",
        ]
        words += ["--only-binary=:all:", "--implementation=cp", f"--python-version={PYTHON[0]}.{PYTHON[1]}"]
        words += [f"--platform={each}" for each in PLATFORMS]
        words += [f"--index-url={self._index}", f"--dest={self._directory}", f"{name}=={version}"]
        self._directory.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(words, capture_output=True, text=True, timeout=FETCH_S, check=False)
        lines = done.stderr.strip().splitlines()
        return lines[-1][:200] if lines else "pip brought nothing"


def files_of(wheel: Path) -> Iterator[tuple[str, int, bytes]]:
    """Yield (path, mode, content) of what a wheel installs beside scripts, by path."""
    with zipfile.ZipFile(wheel) as archive:
        for item in sorted(archive.infolist(), key=lambda item: item.filename):
            path = re.sub(r"^[^/]+\.data/(?:purelib|platlib)/", "", item.filename)
            if not item.is_dir() and not re.match(r"[^/]+\.data/", path):
                yield path, MODES[bool((item.external_attr >> 16) & 0o100)], archive.read(item)


def digest_of(path: Path) -> str:
    """Compute a file's SHA-256, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _tags() -> Iterator[object]:
    from packaging.tags import compatible_tags, cpython_tags

    yield from cpython_tags(PYTHON, platforms=PLATFORMS)
    yield from compatible_tags(PYTHON, f"cp{PYTHON[0]}{PYTHON[1]}", PLATFORMS)


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
