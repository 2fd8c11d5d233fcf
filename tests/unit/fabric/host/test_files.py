"""A file that somebody named is read if it is one, and not too large."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rollfab.fabric.contract.errors import ConfigError
from rollfab.fabric.host.files import read_regular


def test_what_has_no_end_and_what_would_be_waited_for_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for path in (Path("/dev/zero"), tmp_path / "link", tmp_path / "pipe", tmp_path):
        with pytest.raises(ConfigError, match="it is no regular file"):
            read_regular(path, 100)


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    assert read_regular(path, 100) == b"x" * 100
    with pytest.raises(ConfigError, match="has 100 bytes, and may have 99"):
        read_regular(path, 99)
