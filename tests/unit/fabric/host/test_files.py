"""A file that somebody named is read if it is one, and not too large; one that is written is written whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rollfab.fabric.contract.errors import ConfigError
from rollfab.fabric.host.directories import replacing
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


def test_a_file_is_replaced_by_a_whole_one_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text("before")

    def killed(new: Path) -> None:
        new.write_text("half")
        assert path.read_text() == "before"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), replacing(path) as new:
        killed(new)
    with replacing(path):
        pass
    assert path.read_text() == "before"
    with replacing(path) as new:
        new.write_text("after")
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("summary.json", "after")]
