"""Directories of deltas, as slime, miles and Stitch write them, become versions; damaged ones change nothing."""

from __future__ import annotations

import io
import json
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from safetensors.numpy import load_file, save_file

from rollfab.fabric.contract.errors import BrokerError, DigestMismatch, InputError, LayoutMismatch, VersionConflict
from rollfab.fabric.format.layout import Layout, TensorSpec
from rollfab.fabric.inspect.safetensors import INDEX, save_bits
from rollfab.fabric.versions.reader import fetch_bits
from rollfab.trainer.publish.publisher import Publisher
from tests.support.weights.faulty_weights import RUN, FaultyStore, collect
from tests.support.weights.their_deltas import trainer_writes

LAYOUT = Layout(
    (
        TensorSpec("embed.weight", "bfloat16", (40, 8)),
        TensorSpec("frozen.weight", "float16", (3,)),
        TensorSpec("norm.weight", "float32", (8,)),
        TensorSpec("scale", "float8_e4m3fn", ()),
    )
)


class Trainer:
    """One of another framework: a checkpoint, and a directory of deltas. bits: flat, of its last version."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.checkpoint, self.version = directory, directory / "checkpoint", 0
        self._rng = np.random.default_rng(0)
        self.bits = {spec.name: self._rng.integers(0, 200, spec.byte_count, "u1") for spec in LAYOUT.tensors}
        self.checkpoint.mkdir(parents=True)
        self.save(self.checkpoint)

    def save(self, directory: Path) -> None:
        save_bits(directory / "model.safetensors", LAYOUT, self.stored())

    def stored(self) -> dict[str, Any]:
        return {spec.name: self.bits[spec.name].view(spec.bits_dtype).copy() for spec in LAYOUT.tensors}

    def step(self, encoding: str = "xor") -> Path:
        """Change a few bytes of each tensor but one; return the directory of the delta."""
        old = {name: each.tobytes() for name, each in self.bits.items()}
        for name, each in self.bits.items():
            if name != "frozen.weight":
                each[self._rng.integers(0, len(each), 1 + len(each) // 50)] += 1
        self.version += 1
        new = {name: each.tobytes() for name, each in self.bits.items()}
        return trainer_writes(self.directory / "updates", old, new, self.version, encoding=encoding)


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore()


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path)


async def require(store: FaultyStore, version: int, expected: dict[str, Any]) -> None:
    manifest, bits = await fetch_bits(store, RUN, version)
    assert manifest.tensors == LAYOUT
    for name, flat in bits.items():
        np.testing.assert_array_equal(flat, expected[name])


async def test_a_trainers_deltas_become_versions_bit_by_bit(store: FaultyStore, trainer: Trainer) -> None:
    # Given the checkpoint that the trainer began with
    publisher = Publisher(store, RUN)
    await publisher.publish(trainer.checkpoint, 0, allow_nonfinite=True)
    history = [trainer.stored()]

    # When its deltas are published, in either encoding
    for encoding in ("xor", "overwrite", "xor"):
        report = await publisher.publish(trainer.step(encoding), trainer.version, allow_nonfinite=True)
        history.append(trainer.stored())
        assert report.kind == "delta" and 0 < report.changed_count < 40
    assert store.fetched == []  # on the publisher's own copy

    # And by another process, which takes the base from the broker
    await Publisher(store, RUN).publish(trainer.step(), trainer.version, allow_nonfinite=True)
    history.append(trainer.stored())

    # Then every version has every bit
    for version, expected in enumerate(history):
        await require(store, version, expected)


async def test_a_delta_follows_tensors_that_are_compared_on_their_device(store: FaultyStore, trainer: Trainer) -> None:
    publisher = Publisher(store, RUN, compares_on="device")
    tensors = {
        spec.name: torch.from_numpy(trainer.bits[spec.name].copy()).view(getattr(torch, spec.dtype)).reshape(spec.shape)
        for spec in LAYOUT.tensors
    }
    await publisher.publish(tensors, 0, allow_nonfinite=True)

    for version in (1, 2):
        await publisher.publish(trainer.step(), version, allow_nonfinite=True)

    assert store.fetched == []
    await require(store, 2, trainer.stored())


async def test_a_full_version_among_the_deltas_is_published_too(store: FaultyStore, trainer: Trainer) -> None:
    publisher = Publisher(store, RUN)
    await publisher.publish(trainer.checkpoint, 0, allow_nonfinite=True)
    trainer.step()
    trainer.step()
    full = trainer.directory / "updates" / "weight_v000003"
    full.mkdir()
    trainer.version = 3
    trainer.save(full)
    (full / INDEX).write_text(
        json.dumps({"metadata": {"version": "000003"}, "weight_map": dict.fromkeys(trainer.bits, "model.safetensors")})
    )

    await publisher.publish(full, 3, allow_nonfinite=True)
    await publisher.publish(trainer.step(), 4, allow_nonfinite=True)

    await require(store, 4, trainer.stored())


async def test_a_delta_without_changes_is_a_version(store: FaultyStore, trainer: Trainer) -> None:
    publisher = Publisher(store, RUN)
    await publisher.publish(trainer.checkpoint, 0, allow_nonfinite=True)
    same = {name: each.tobytes() for name, each in trainer.bits.items()}
    report = await publisher.publish(
        trainer_writes(trainer.directory / "updates", same, same, 1), 1, allow_nonfinite=True
    )
    assert (report.version, report.changed_count) == (1, 0)


@pytest.mark.parametrize("point", ["put_chunks", "put_manifest", "advance_head"])
@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_delta_that_could_not_be_sent_is_published_again(
    store: FaultyStore, trainer: Trainer, point: str, is_lost: bool
) -> None:
    publisher = Publisher(store, RUN)
    await publisher.publish(trainer.checkpoint, 0, allow_nonfinite=True)
    path = trainer.step()
    store.fail_at, store.lose_answer_at = ("", point) if is_lost else (point, "")
    with pytest.raises(BrokerError):
        await publisher.publish(path, 1, allow_nonfinite=True)
    store.fail_at = store.lose_answer_at = ""

    await publisher.publish(path, 1, allow_nonfinite=True)
    await publisher.publish(trainer.step(), 2, allow_nonfinite=True)

    await require(store, 2, trainer.stored())


# ---- what is refused


async def test_a_delta_is_taken_onto_its_base_alone(store: FaultyStore, trainer: Trainer) -> None:
    publisher = Publisher(store, RUN)
    first, second, third = trainer.step(), trainer.step(), trainer.step()
    with pytest.raises(VersionConflict, match=r"change of version 0.*has no weights yet: publish the checkpoint that"):
        await publisher.publish(first, 1, allow_nonfinite=True)
    trainer = Trainer(trainer.directory / "again")
    await publisher.publish(trainer.checkpoint, 0, allow_nonfinite=True)
    with pytest.raises(VersionConflict, match=r"change of version 1, and run 'publish' holds version 0: publish those"):
        await publisher.publish(second, 2, allow_nonfinite=True)
    with pytest.raises(InputError, match=r"weight_v000001 is version 1, and was to be published as 5: give version=1"):
        await publisher.publish(first, 5, allow_nonfinite=True)
    await publisher.publish(first, 1, allow_nonfinite=True)
    for each in (first, third):
        with pytest.raises(VersionConflict):
            await publisher.publish(each, int(each.name[-1]), allow_nonfinite=True)
    await publisher.publish(second, 2, allow_nonfinite=True)
    await publisher.publish(third, 3, allow_nonfinite=True)


def edit_index(path: Path, **facts: Any) -> None:
    index = json.loads((path / INDEX).read_text())
    index["metadata"] |= facts
    (path / INDEX).write_text(json.dumps(index))


def edit_file(path: Path, edit: Callable[[dict[str, Any], dict[str, str]], Any]) -> None:
    """Change the tensors and checksums of the file that has embed.weight."""
    file = path / json.loads((path / INDEX).read_text())["weight_map"]["embed.weight"]
    frames = {name: np.array(frame) for name, frame in load_file(file).items()}
    header = file.read_bytes()
    length = int.from_bytes(header[:8], "little")
    checksums = json.loads(header[8 : 8 + length])["__metadata__"]
    edit(frames, checksums)
    save_file(frames, file, metadata=checksums)


def packed(data: bytes, *, is_silent: bool = False) -> Any:
    """A frame. is_silent: without the length of what is in it."""
    if not is_silent:
        return np.frombuffer(zstandard.ZstdCompressor().compress(data), "u1")
    out = io.BytesIO()
    with zstandard.ZstdCompressor(write_content_size=False).stream_writer(out, closefd=False) as writer:
        writer.write(data)
    return np.frombuffer(out.getvalue(), "u1")


def put(frame: Any) -> Callable[[Path], None]:
    return lambda path: edit_file(path, lambda frames, sums: frames.update({"embed.weight": frame}))


def overwriting(change: bytes) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        edit_index(path, delta_encoding="overwrite")
        put(packed(change))(path)

    return damage


def cut_off(path: Path) -> None:
    file = sorted(path.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-3])


def turn_a_bit(path: Path) -> None:
    def edit(frames: dict[str, Any], sums: dict[str, str]) -> None:
        change = bytearray(zstandard.ZstdDecompressor().decompress(frames["embed.weight"].tobytes()))
        change[77] ^= 1
        frames["embed.weight"] = packed(bytes(change))

    edit_file(path, edit)


def rename(path: Path) -> None:
    def edit(frames: dict[str, Any], sums: dict[str, str]) -> None:
        frames["other.weight"], sums["other.weight"] = frames.pop("embed.weight"), sums.pop("embed.weight")

    index = json.loads((path / INDEX).read_text())
    file = index["weight_map"]["embed.weight"]
    edit_file(path, edit)
    index["weight_map"]["other.weight"] = file
    del index["weight_map"]["embed.weight"]
    (path / INDEX).write_text(json.dumps(index))


def forget(path: Path) -> None:
    index = json.loads((path / INDEX).read_text())
    del index["weight_map"]["scale"]  # a file that also has embed.weight
    (path / INDEX).write_text(json.dumps(index))


def promise_more(path: Path) -> None:
    index = json.loads((path / INDEX).read_text())
    index["weight_map"]["frozen.weight"] = index["weight_map"]["embed.weight"]
    (path / INDEX).write_text(json.dumps(index))


COUNT = (640).to_bytes(4, "little")
FAR = (1).to_bytes(4, "little") + (640).to_bytes(4, "little") + b"x"

DAMAGES: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "a file is missing": (
        lambda path: sorted(path.glob("*.safetensors"))[1].unlink(),
        InputError,
        r"weight_v000001 has no 'model-00001-of-00002.safetensors'.*not complete",
    ),
    "a file of another": (
        lambda path: (path / "model-00009.safetensors").write_bytes(b""),
        InputError,
        r"has 'model-00009.safetensors', which its .* does not name",
    ),
    "no index": (lambda path: (path / INDEX).unlink(), InputError, "has changes of weights, and no weights"),
    "an index of nothing": (lambda path: (path / INDEX).write_text("[]"), InputError, "index.json cannot be read"),
    "no encoding": (
        lambda path: (path / INDEX).write_text((path / INDEX).read_text().replace("delta_encoding", "encoding")),
        InputError,
        "has changes of weights, and no weights",
    ),
    "unknown encoding": (
        lambda path: edit_index(path, delta_encoding="minus"),
        InputError,
        "delta_encoding is 'minus', and 'xor' or 'overwrite' is read",
    ),
    "unknown compression": (
        lambda path: edit_index(path, compression_format="lz4"),
        InputError,
        "compression_format is 'lz4', and 'zstd' is read",
    ),
    "unknown checksum": (
        lambda path: edit_index(path, checksum_format="md5"),
        InputError,
        "index.json: checksum format 'md5' is unknown: use one of xxh3-128, adler32, blake3",
    ),
    "wrong base": (
        lambda path: edit_index(path, version="000009", base_version="000008"),
        InputError,
        "is version 9, and was to be published as 1",
    ),
    "base after it": (lambda path: edit_index(path, base_version="000001"), InputError, "does not come after its base"),
    "no number": (lambda path: edit_index(path, version="9" * 5000), InputError, "not a whole number"),
    "other encoding": (
        lambda path: edit_index(path, delta_encoding="overwrite"),
        InputError,
        "are no .* positions and values",
    ),
    "a file cut off": (cut_off, InputError, r"safetensors: tensor '.*' is cut off"),
    "no checksum": (
        lambda path: edit_file(path, lambda frames, sums: sums.pop("embed.weight")),
        InputError,
        "has no checksum of tensor 'embed.weight'",
    ),
    "wrong checksum": (
        lambda path: edit_file(path, lambda frames, sums: sums.update({"embed.weight": "0" * 32})),
        DigestMismatch,
        f"checksum [0-9a-f]{{32}} after the change, and {'0' * 32} is promised.*weights diff 0 --checkpoint",
    ),
    "a bit of a change": (turn_a_bit, DigestMismatch, "tensor 'embed.weight' has checksum"),
    "another name": (rename, LayoutMismatch, r"changes 1 tensors that the run does not have \(other.weight\)"),
    "a tensor too much": (forget, InputError, "has tensor 'scale', and the .* says otherwise"),
    "a tensor too few": (promise_more, InputError, "has no tensor 'frozen.weight', and the .* says so"),
    "no frame": (put(np.zeros(9, "u1")), InputError, r"tensor 'embed.weight' is not a zstd frame"),
    "another shape": (put(packed(bytes(320))), LayoutMismatch, "the change is of 320 bytes, and .* has 640"),
    "another dtype": (put(packed(bytes(1280))), LayoutMismatch, "promises 1,280 bytes, .* has another shape or dtype"),
    "two frames": (
        put(np.concatenate([packed(bytes(640)), packed(b"more")])),
        InputError,
        "cannot be unpacked to the 640 bytes",
    ),
    "a frame cut off": (put(packed(bytes(range(256)) * 3)[:-100]), LayoutMismatch, "promises 768 bytes"),
    "half a frame": (put(packed(np.random.default_rng(0).bytes(640))[:-9]), InputError, "cannot be unpacked"),
    "a bomb": (put(packed(bytes(1 << 28))), LayoutMismatch, "promises 268,435,456 bytes"),
    "a silent bomb": (
        put(packed(bytes(1 << 28), is_silent=True)),
        InputError,
        "cannot be unpacked to the 640 bytes that embed.weight",
    ),
    "positions cut off": (overwriting(COUNT + bytes(50)), InputError, "54 bytes are no 640 positions"),
    "no count": (overwriting(b"\1\0"), InputError, "2 bytes are no"),
    "a place too far": (overwriting(FAR), LayoutMismatch, "reaches byte 640, and .* has 640"),
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_damaged_delta_is_refused_whole(store: FaultyStore, trainer: Trainer, damage: str) -> None:
    # Given a run at the trainer's first version, and a delta that is damaged after it was written
    publisher = Publisher(store, RUN)
    await publisher.publish(trainer.checkpoint, 0, allow_nonfinite=True)
    before = trainer.stored()
    path = trainer.step()
    good = {file.name: file.read_bytes() for file in path.iterdir()}
    change, kind, text = DAMAGES[damage]
    change(path)

    # When it is published
    tracemalloc.start()
    try:
        with pytest.raises(kind, match=text) as raised:
            await publisher.publish(path, 1, allow_nonfinite=True)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    # Then nothing has changed, and no more memory was taken than the tensors need
    assert str(path) in str(raised.value)
    assert peak_bytes < 8 << 20
    assert list(await store.held(RUN)) == [(0, "keyframe")]
    await require(store, 0, before)

    # And the whole delta is taken after it
    for file in path.iterdir():
        file.unlink()
    for name, data in good.items():
        (path / name).write_bytes(data)
    await publisher.publish(path, 1, allow_nonfinite=True)
    await require(store, 1, trainer.stored())


async def test_another_base_is_told_by_the_checksums(store: FaultyStore, trainer: Trainer) -> None:
    other = trainer.stored()
    other["embed.weight"][5] ^= 1
    save_bits(trainer.checkpoint / "model.safetensors", LAYOUT, other)
    await Publisher(store, RUN).publish(trainer.checkpoint, 0, allow_nonfinite=True)
    path = trainer.step()
    with pytest.raises(DigestMismatch, match=re.escape("the run's version 0 is not the trainer's")):
        await Publisher(store, RUN).publish(path, 1, allow_nonfinite=True)


def test_a_file_of_a_delta_and_a_delta_for_several_ranks_are_refused(trainer: Trainer) -> None:
    path = trainer.step()
    for given in (path, next(path.glob("*.safetensors"))):
        with pytest.raises(InputError, match=r"give the directory of the whole delta.*without a group"):
            collect(given)
