"""Weights on the api's machine: directories that may be published, and files that arrive in pieces.

- Everything lies below one directory, which whoever starts the api names; only plain files below it are read.
- A file arrives by pieces of at most one request's body, each with its offset: who lost the answer sends the piece
  again, or asks how much is here. A piece that says otherwise than what is here is refused.
- A version that is being published has its files to itself: what is uploaded meanwhile begins anew. They are removed
  once it is published, and there again if it is refused.
- A piece is refused where it would leave less than ROOM_BYTES on the disk.
"""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from ...fabric.contract.errors import ConfigError, InputError
from ...fabric.contract.limits import MIB
from ...fabric.host.directories import told_below, weights_in

FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}\.safetensors|model\.safetensors\.index\.json")
ROOM_BYTES = 1024 * MIB
UPLOADS = "uploads"


class WeightFiles:
    """The directory. root: None: there is none, and everything is refused."""

    def __init__(self, root: Path | None) -> None:
        self._root = None if root is None else root.resolve()
        self._sealed: set[Path] = set()

    def find(self, directory: str) -> Path:
        """Return a directory or safetensors file that may be published.

        Raises:
            InputError: it is not there, lies elsewhere, or holds what is no plain file below the directory.
        """
        return weights_in(self._rooted(), directory)

    def told_below(self) -> AbstractContextManager[None]:
        """Have errors of the block tell nobody where the directory is."""
        return told_below(self._root)

    @contextmanager
    def sealed(self, run_id: str, version: int) -> Iterator[Path]:
        """Give the directory of what was uploaded for a version, which nobody else writes to in the block.

        Raises:
            InputError: nothing was.
        """
        place = self._place(run_id, version)
        mine = place.with_name(f".{version}.{secrets.token_hex(4)}")
        try:
            (place if place.is_dir() else self._left_over(place)).rename(mine)
        except OSError as error:
            raise InputError(
                f"no file was uploaded for version {version} of run {run_id!r}, or it is being published: send it by "
                f"PUT /v1/runs/{run_id}/uploads/{version}/model.safetensors, or name a directory",
                name="version",
            ) from error
        self._sealed.add(mine)
        try:
            yield mine
        except BaseException:
            if not place.exists():
                mine.rename(place)
            raise
        finally:
            self._sealed.discard(mine)
            shutil.rmtree(mine, ignore_errors=True)

    def _left_over(self, place: Path) -> Path:
        """Return the files of a version that was being published when an api ended; or `place`, which is not there."""
        found = [each for each in place.parent.glob(f".{place.name}.*") if each not in self._sealed]
        return found[0] if found else place

    def has(self, run_id: str, version: int) -> bool:
        """Tell whether anything was uploaded for a version."""
        return self._place(run_id, version).is_dir()

    def drop(self, run_id: str, version: int) -> bool:
        """Remove what was uploaded for a version; return whether there was anything."""
        place = self._place(run_id, version)
        was_there = self.has(run_id, version)
        shutil.rmtree(place, ignore_errors=True)
        return was_there

    def size(self, run_id: str, version: int, name: str) -> int:
        """Return how many bytes of a file are here."""
        path = self._file(run_id, version, name)
        return path.stat().st_size if path.exists() else 0

    def add(self, run_id: str, version: int, name: str, offset: int, data: bytes) -> int:
        """Write a piece of a file; return how many bytes of it are here. What is here already changes nothing.

        Raises:
            InputError: there is a gap before it, other bytes are here, it is no name of such a file, or the disk has no
                room.
        """
        path, here = self._file(run_id, version, name), self.size(run_id, version, name)
        if offset > here:
            raise InputError(f"{name} has {here:,} bytes here, and this piece begins at {offset:,}: go on at {here}")
        free = shutil.disk_usage(self._rooted()).free
        if free - len(data) < ROOM_BYTES:
            raise InputError(f"the disk of {self._rooted()} has {free:,} bytes left: make room there, then go on")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("r+b" if path.exists() else "x+b") as file:
            file.seek(offset)
            known = file.read(len(data))
            if known != data[: len(known)]:
                raise InputError(
                    f"{name} has other bytes here from {offset:,} on: two clients upload it, or it begins anew. Remove "
                    f"it first: DELETE /v1/runs/{run_id}/uploads/{version}"
                )
            file.write(data[len(known) :])
        return path.stat().st_size

    def _rooted(self) -> Path:
        if self._root is None:
            raise ConfigError(
                "this api takes no weights: have it started with `rollfab api --train --weights DIRECTORY`"
            )
        return self._root

    def _place(self, run_id: str, version: int) -> Path:
        return self._rooted() / UPLOADS / run_id / str(version)

    def _file(self, run_id: str, version: int, name: str) -> Path:
        if not FILE_NAME.fullmatch(name):
            raise InputError(f"{name!r:.120} is no name of a file to upload: use model.safetensors, say", name="file")
        return self._place(run_id, version) / name
