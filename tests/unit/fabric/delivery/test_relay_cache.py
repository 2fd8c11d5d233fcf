"""The node's chunk files: complete or not there, verified, bounded, and nobody's for ever."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rollfab.fabric.contract.errors import ConfigError, WireError
from rollfab.fabric.delivery import node_cache as cache_module
from rollfab.fabric.delivery.node_cache import ChunkCache, ChunkName, check_chunk_name, open_cache
from rollfab.fabric.delivery.node_store import DEPTH, FetchLock, Owner, take_fetch_lock
from rollfab.fabric.format.manifest import chunk_digest
from tests.support.processes.relay_nodes import file_names

KIB = 1 << 10


def chunk(seed: int, size: int = 8 * KIB) -> tuple[ChunkName, bytes]:
    data = bytes([seed]) * size
    return ChunkName(chunk_digest(data), size), data


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "node"


def test_what_one_process_writes_another_reads(directory: Path) -> None:
    name, data = chunk(1)
    writer, reader = ChunkCache(directory), ChunkCache(directory)

    assert reader.read(name) is None
    assert writer.write(name, data)

    assert reader.has(name)
    assert reader.read(name) == data
    assert directory.stat().st_mode & 0o777 == 0o700
    writer.close()
    reader.close()


@pytest.mark.parametrize("damaged", [b"\x01" * (8 * KIB - 1) + b"\x02", b"short", b""])
def test_a_corrupt_file_is_removed(directory: Path, damaged: bytes) -> None:
    name, data = chunk(1)
    cache = ChunkCache(directory)
    cache.write(name, data)
    (directory / file_names(directory)[0]).write_bytes(damaged)

    assert cache.read(name) is None

    assert file_names(directory) == []
    cache.close()


def test_the_least_recently_used_leave_first(directory: Path) -> None:
    cache = ChunkCache(directory, budget_bytes=128 * KIB)
    chunks = [chunk(seed) for seed in range(40)]

    for name, data in chunks:
        assert cache.write(name, data)
        cache.read(chunks[0][0])
        total = sum((directory / file).stat().st_size for file in file_names(directory))
        assert total <= 128 * KIB

    assert cache.has(chunks[0][0])
    assert cache.has(chunks[-1][0])
    assert not cache.has(chunks[1][0])
    cache.close()


def test_a_chunk_that_would_push_out_most_others_is_not_kept(directory: Path) -> None:
    cache = ChunkCache(directory, budget_bytes=32 * KIB)

    assert not cache.write(*chunk(1, 8 * KIB))
    cache.close()


def test_what_a_dead_writer_began_goes_and_what_a_living_one_began_stays(directory: Path) -> None:
    code = (
        "import fcntl, pathlib, sys, time; file = open(sys.argv[1], 'xb'); fcntl.flock(file, fcntl.LOCK_EX);"
        " file.write(b'half'); file.flush(); print(flush=True); time.sleep(60)"
    )
    cache = ChunkCache(directory, budget_bytes=64 * KIB)
    unfinished = directory / "new-0123"
    with subprocess.Popen([sys.executable, "-c", code, unfinished], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        cache.write(*chunk(1, 8 * KIB))
        assert unfinished.exists()
        writer.kill()
        writer.wait()

    cache.write(*chunk(2, 8 * KIB))

    assert not unfinished.exists()
    cache.close()


def test_the_last_to_leave_clears_up(directory: Path) -> None:
    first, second = ChunkCache(directory), ChunkCache(directory)
    first.write(*chunk(1))

    first.close()
    assert second.read(chunk(1)[0]) == chunk(1)[1]
    second.close()

    assert not directory.exists()


def test_the_cache_of_a_dead_fabric_goes_when_another_one_comes(tmp_path: Path) -> None:
    old = str(tmp_path / "old")
    code = f"from rollfab.fabric.delivery.node_cache import *; import os; ChunkCache(Path({old!r})); os._exit(1)"
    subprocess.run([sys.executable, "-c", code], check=False)
    living = ChunkCache(tmp_path / "living")
    assert (tmp_path / "old").exists()

    cache = open_cache("broker", root=tmp_path)

    assert cache is not None
    assert sorted(os.listdir(tmp_path)) == ["broker", "living"]
    cache.close()
    living.close()


def test_a_cache_whose_remover_was_killed_half_way_goes_and_what_is_no_cache_stays(tmp_path: Path) -> None:
    for name in ("dead", "stranger"):
        ChunkCache(tmp_path / name).write(*chunk(1))
        (tmp_path / name / "alive").unlink()
    (tmp_path / "stranger" / "thesis.tex").touch()

    cache = open_cache("broker", root=tmp_path)

    assert cache is not None
    assert sorted(os.listdir(tmp_path)) == ["broker", "stranger"]
    assert sorted(os.listdir(tmp_path / "stranger"))[1:] == ["thesis.tex"]
    cache.close()


def test_a_cache_that_is_being_cleared_away_is_opened_once_it_is_gone(directory: Path) -> None:
    directory.mkdir()
    remover = os.open(directory / "alive", os.O_RDWR | os.O_CREAT)
    fcntl.flock(remover, fcntl.LOCK_EX)

    def finish() -> None:
        shutil.rmtree(directory)
        os.close(remover)

    threading.Timer(0.1, finish).start()
    cache = ChunkCache(directory)

    assert cache.write(*chunk(1))
    cache.close()


def test_who_comes_late_may_keep_as_much_as_who_came_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a machine with room for 18 MiB, 7 of them taken by the cache
    chunks = [chunk(seed, 1 << 20) for seed in range(7)]
    monkeypatch.setattr(cache_module, "FREE_BYTES_MIN", 16 << 20)

    def free_bytes(root: Path) -> int:
        return (18 << 20) - sum(file.stat().st_size for file in root.rglob("*-*"))

    monkeypatch.setattr(cache_module, "_free_bytes", free_bytes)
    first = open_cache("broker", root=tmp_path)
    assert first is not None and all(first.write(*each) for each in chunks)

    # When another process opens it, then it finds room too, and takes nothing away
    second = open_cache("broker", root=tmp_path)

    assert second is not None and second.write(*chunk(7, 1 << 20))
    assert all(second.has(name) for name, _ in chunks)
    first.close()
    second.close()


def test_without_room_there_is_no_cache_and_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "FREE_BYTES_MIN", 1 << 60)

    with caplog.at_level(logging.WARNING):
        assert open_cache("broker", root=tmp_path) is None

    assert len(caplog.records) == 1
    assert "--shm-size" in caplog.text


def test_a_directory_that_others_may_write_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)

    assert open_cache("broker", root=tmp_path / "open") is None
    with pytest.raises(ConfigError):
        open_cache("../elsewhere", root=tmp_path)


@pytest.mark.parametrize("digest", ["../../etc/passwd", "0123456789ABCDEF", "0123456789abcdef\n", ""])
def test_a_name_that_is_no_digest_touches_no_file(digest: str) -> None:
    with pytest.raises(WireError):
        check_chunk_name(ChunkName(digest, 3))


def test_a_cache_that_is_taken_away_is_only_empty(directory: Path) -> None:
    cache = ChunkCache(directory)
    for entry in [*directory.iterdir()]:
        entry.unlink()
    directory.rmdir()

    assert not cache.write(*chunk(1))
    assert cache.read(chunk(1)[0]) is None
    cache.close()


def test_one_has_the_lock_until_it_lets_go(directory: Path) -> None:
    directory.mkdir()
    first = take_fetch_lock(directory, "v1", [])
    assert isinstance(first, FetchLock)

    owner = take_fetch_lock(directory, "v1", [])
    assert isinstance(owner, Owner)
    first.beat()
    beaten = take_fetch_lock(directory, "v1", [])
    assert isinstance(beaten, Owner)
    assert (beaten.token, beaten.beat_ns >= owner.beat_ns) == (owner.token, True)
    first.release()

    second = take_fetch_lock(directory, "v1", [])
    assert isinstance(second, FetchLock)
    second.release()


def test_a_stalled_owner_is_passed_by_one_and_the_others_wait_for_that_one(directory: Path) -> None:
    directory.mkdir()
    frozen = take_fetch_lock(directory, "v1", [])
    owner = take_fetch_lock(directory, "v1", [])
    assert isinstance(frozen, FetchLock) and isinstance(owner, Owner)

    passing = take_fetch_lock(directory, "v1", [owner.token])
    assert isinstance(passing, FetchLock)
    waits_for = take_fetch_lock(directory, "v1", [owner.token])

    assert isinstance(waits_for, Owner) and waits_for.token != owner.token
    frozen.release()  # it wakes up: its lock is free, but somebody is at work
    assert take_fetch_lock(directory, "v1", []) == waits_for
    passing.release()


def test_behind_too_many_stalled_owners_everybody_fetches(directory: Path) -> None:
    directory.mkdir()
    stalled: list[bytes] = []
    locks: list[FetchLock] = []
    for _ in range(DEPTH):
        lock = take_fetch_lock(directory, "v1", stalled)
        owner = take_fetch_lock(directory, "v1", stalled)
        assert isinstance(lock, FetchLock) and isinstance(owner, Owner)
        locks.append(lock)
        stalled.append(owner.token)

    with pytest.raises(OSError, match="stalled"):
        take_fetch_lock(directory, "v1", stalled)
    for lock in locks:
        lock.release()
