"""What an engine in vLLM's development mode may be told to open, and where it may be reached."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rollfab.fabric.contract.errors import EngineError, WeightError
from rollfab.fabric.format.layout import Layout, TensorSpec
from rollfab.workers.engines.vllm.attached.backend import ServerDoor, check_place, is_loopback
from rollfab.workers.engines.vllm.attached.client import Client
from rollfab.workers.engines.vllm.attached.model import ServedModel
from rollfab.workers.engines.vllm.common.arena import MIRROR, PARCEL, Mirror
from rollfab.workers.engines.vllm.common.shared import SharedFile, open_shared
from rollfab.workers.engines.vllm.inplace.rank_answers import DIRECTORY_PREFIX, check_directory
from rollfab.workers.engines.vllm.inplace.version_files import MappedVersion

LINUX = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="there are no anonymous files here")
LAYOUT = Layout((TensorSpec("w", "float32", (4,)),))
PRECIOUS = b"precious" * 512


@pytest.fixture
def parcel() -> Iterator[SharedFile]:
    file = SharedFile(PARCEL, len(PRECIOUS))
    file.write(PRECIOUS)
    yield file
    file.close()


def test_what_a_worker_shares_is_opened_by_its_path(parcel: SharedFile) -> None:
    handle = open_shared(parcel.path, PARCEL)
    assert os.pread(handle, len(PRECIOUS), 0) == PRECIOUS
    os.close(handle)


def test_memory_of_another_name_is_not_opened(parcel: SharedFile) -> None:
    with pytest.raises(WeightError, match="no memory 'rollfab-weights'"):
        open_shared(parcel.path, MIRROR, is_written=True)
    with pytest.raises(WeightError, match="no memory 'rollfab-weights'"):
        Mirror(LAYOUT, parcel.path)


def test_no_other_file_is_opened_or_written(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(PRECIOUS)
    lookalike = tmp_path / f"memfd:{MIRROR} (deleted)"
    lookalike.write_bytes(PRECIOUS)
    os.mkfifo(tmp_path / "pipe")
    link = tmp_path / "link"
    mirror = Mirror.create(LAYOUT)
    link.symlink_to(mirror.path)
    with victim.open("r+b") as opened, lookalike.open("r+b") as alike:
        ways = [victim, lookalike, tmp_path / "pipe", link, Path("/dev/zero"), Path("/proc/self/mem"), Path("")]
        ways += [Path(f"/proc/{os.getpid()}/fd/{file.fileno()}") for file in (opened, alike)]
        ways += [Path(f"{mirror.path}/../../../..{victim}"), Path(f"{mirror.path}\n")]
        for way in ways:
            with pytest.raises(WeightError, match="no memory"):
                Mirror(LAYOUT, way)
            with pytest.raises(WeightError, match="no memory"):
                MappedVersion(str(way))
    assert victim.read_bytes() == lookalike.read_bytes() == PRECIOUS
    mirror.close()


@LINUX
def test_memory_that_may_shrink_is_not_opened() -> None:
    # Given memory of the right name, which could be cut off while it is mapped: the engine would die of it
    handle = os.memfd_create(MIRROR, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(handle, 4096)
    with pytest.raises(WeightError, match="no memory"):
        Mirror(LAYOUT, Path(f"/proc/{os.getpid()}/fd/{handle}"))
    os.close(handle)


@LINUX
def test_what_is_shared_keeps_its_size() -> None:
    mirror = Mirror.create(LAYOUT)
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.truncate(mirror.path, size)
    mirror.take({"w": (None, np.ones(4, np.uint32))})
    assert mirror.bits["w"].tolist() == [1] * 4
    mirror.close()


def test_answers_go_into_a_directory_of_a_worker_only(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=DIRECTORY_PREFIX) as made:
        check_directory(Path(made))
        os.chmod(made, 0o777)
        with pytest.raises(WeightError, match="no directory"):
            check_directory(Path(made))
        os.chmod(made, 0o700)
        link = tmp_path / f"{DIRECTORY_PREFIX}link"
        link.symlink_to(made)
        for other in (tmp_path, link, Path(made) / "..", Path("/etc")):
            with pytest.raises(WeightError, match="no directory"):
                check_directory(other)
    with pytest.raises(WeightError, match="nobody waits"):
        check_directory(Path(made))


@pytest.mark.parametrize("host", ["10.0.0.7", "gpu-7", "0.0.0.0", "[2001:db8::7]", "localhost.example.org"])
def test_a_server_in_development_mode_is_refused_over_a_network(host: str) -> None:
    with pytest.raises(EngineError, match="development mode") as caught:
        check_place(f"http://{host}:8000")
    assert "--host 127.0.0.1" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("address", "family", "is_fine"),
    [
        ("127.0.0.1", socket.AF_INET, True),
        ("0.0.0.0", socket.AF_INET, False),
        ("::1", socket.AF_INET6, True),
        ("::", socket.AF_INET6, False),
    ],
)
@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="there is no table of sockets here")
def test_a_server_in_development_mode_that_listens_everywhere_is_refused(
    address: str, family: socket.AddressFamily, is_fine: bool
) -> None:
    with socket.socket(family) as server:
        try:
            server.bind((address, 0))
        except OSError:
            assert family == socket.AF_INET6, "only version 6 may be missing on a machine"
            return
        server.listen()
        url = f"http://localhost:{server.getsockname()[1]}"
        if is_fine:
            check_place(url)
        else:
            with pytest.raises(EngineError, match="listens at"):
                check_place(url)


def test_loopback_is_known_in_every_form() -> None:
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1")))
    assert not any(map(is_loopback, ("", "0.0.0.0", "::", "::ffff:10.0.0.1", "localhost.example.org")))


async def test_a_server_is_reached_over_a_unix_socket(tmp_path: Path) -> None:
    from aiohttp import web

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"path": request.path})

    app = web.Application()
    app.router.add_get("/health", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "vllm.sock")).start()
    client = Client(f"unix://{tmp_path}/vllm.sock", None)
    check_place(client.url)

    assert await client.ask("GET", "/health") == {"path": "/health"}

    await client.close()
    await runner.cleanup()


async def test_a_worker_does_not_open_the_door_of_such_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    async def find(client: Client, wanted: str) -> SimpleNamespace:
        return SimpleNamespace(info={})

    monkeypatch.setattr(ServedModel, "find", find)
    door = ServerDoor("http://gpu-7:8000", slot_count=1, context_tokens_max=None)
    with pytest.raises(EngineError, match="is reached at gpu-7"):
        await door.open()
    await door.close()
