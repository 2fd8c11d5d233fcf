"""Weights on the api's machine: directories that may be published, and files that arrive in pieces.

- Everything lies below one directory, which whoever starts the api names. No link that leads out of it is followed.
- A file arrives by pieces of at most one request's body, each with its offset: who lost the answer asks how much is
  here, and goes on from there. The files of a version are removed once it is published.
- A piece is refused where it would leave less than ROOM_BYTES on the disk.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from ...fabric.contract.errors import ConfigError, InputError
from ...fabric.contract.limits import MIB
from ...fabric.host.directories import place_in

FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}\.(safetensors|json)")
ROOM_BYTES = 1024 * MIB
UPLOADS = "uploads"


class WeightFiles:
    """The directory. root: None: there is none, and everything is refused."""

    def __init__(self, root: Path | None) -> None:
        self._root = None if root is None else root.resolve()

    def find(self, directory: str) -> Path:
        """Return a directory or safetensors file that may be published.

        Raises:
            InputError: it is not there, or lies elsewhere.
        """
        return place_in(self._rooted(), directory, "--weights")

    def uploaded(self, run_id: str, version: int) -> Path:
        """Return the directory of the files that were uploaded for a version. Raises InputError: there are none."""
        path = self._place(run_id, version)
        if not path.is_dir():
            raise InputError(
                f"no file was uploaded for version {version} of run {run_id!r}: send it by PUT "
                f"/v1/runs/{run_id}/uploads/{version}/model.safetensors, or name a directory",
                name="version",
            )
        return path

    def forget(self, run_id: str, version: int) -> None:
        """Remove what was uploaded for a version."""
        shutil.rmtree(self._place(run_id, version), ignore_errors=True)

    def size(self, run_id: str, version: int, name: str) -> int:
        """Return how many bytes of a file are here."""
        path = self._file(run_id, version, name)
        return path.stat().st_size if path.exists() else 0

    def add(self, run_id: str, version: int, name: str, offset: int, data: bytes) -> int:
        """Write a piece of a file; return how many bytes of it are here. A piece that is here already changes nothing.

        Raises:
            InputError: there is a gap before it, it is no name of such a file, or the disk has no room.
        """
        path, here = self._file(run_id, version, name), self.size(run_id, version, name)
        if offset > here:
            raise InputError(f"{name} has {here:,} bytes here, and this piece begins at {offset:,}: go on at {here}")
        free = shutil.disk_usage(self._rooted()).free
        if free - len(data) < ROOM_BYTES:
            raise InputError(f"the disk of {self._rooted()} has {free:,} bytes left: make room there, then go on")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("r+b" if path.exists() else "wb") as file:
            file.seek(offset)
            file.write(data)
            if offset == 0:
                file.truncate()  # a first piece begins the file anew
        return path.stat().st_size

    def _rooted(self) -> Path:
        if self._root is None:
            raise ConfigError("this api takes no weights: start it with --weights DIRECTORY, where they may lie")
        return self._root

    def _place(self, run_id: str, version: int) -> Path:
        return self._rooted() / UPLOADS / run_id / str(version)

    def _file(self, run_id: str, version: int, name: str) -> Path:
        if not FILE_NAME.fullmatch(name):
            raise InputError(f"{name!r:.120} is no name of a file to upload: use model.safetensors, say", name="file")
        return self._place(run_id, version) / name
