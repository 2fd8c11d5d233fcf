"""Deltas on disk: what trainers write is read, and what is written is applied by engines, bit by bit.

The other side of each is tests/support/weights/their_deltas.py, made from the format alone.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from rollfab.fabric.contract.errors import ConfigError, DigestMismatch, InputError, LayoutMismatch
from rollfab.fabric.format.layout import Layout, TensorSpec
from rollfab.fabric.inspect import disk_delta
from rollfab.fabric.inspect.disk_delta import ENCODINGS, Form, holds_changes, new_bits, open_delta, save_delta
from rollfab.fabric.inspect.safetensors import INDEX, open_checkpoint, save_bits
from tests.support.tried import tried
from tests.support.weights.their_deltas import Engine, trainer_writes
from tests.support.weights.weight_models import SPECIAL, Model, draw_layout


@st.composite
def steps(draw: st.DrawFn) -> tuple[Layout, dict[str, Any], dict[str, Any]]:
    """A layout, and its bits before and after a step of training: every dtype, zeros of both signs, payloads of NaN."""
    seed = draw(st.integers(0, 2**32))
    random, rng = Random(seed), np.random.default_rng(seed)
    model = Model(draw_layout(random, has_table=False), rng, random)
    for spec in model.layout.tensors:
        special = np.array(SPECIAL[spec.bits_dtype.itemsize], spec.bits_dtype)
        model.bits[spec.name][: len(special)] = special[: spec.element_count]
    old = {name: flat.copy() for name, flat in model.bits.items()}
    model.train()
    return model.layout, old, model.bits


def as_bytes(bits: dict[str, Any]) -> dict[str, bytes]:
    return {name: flat.tobytes() for name, flat in bits.items()}


FORMS = {"encoding": st.sampled_from(ENCODINGS), "sums": st.sampled_from(["xxh3-128", "adler32"])}


@settings(max_examples=tried(25))
@given(step=steps(), **FORMS)
def test_every_bit_that_a_trainer_wrote_is_read(step: Any, encoding: str, sums: str) -> None:
    layout, old, new = step
    with tempfile.TemporaryDirectory() as directory:
        path = trainer_writes(Path(directory), as_bytes(old), as_bytes(new), 7, encoding=encoding, sums=sums)

        delta = open_delta(path)
        assert delta is not None
        found = new_bits(delta, layout, old)

    assert (delta.version, delta.base_version) == (7, 6)
    assert found.keys() == {name for name in new if not np.array_equal(old[name], new[name])}
    for name, flat in found.items():
        assert flat.dtype == new[name].dtype and flat.tobytes() == new[name].tobytes()


@settings(max_examples=tried(25))
@given(step=steps(), **FORMS)
def test_every_bit_that_is_written_is_applied_by_an_engine(step: Any, encoding: str, sums: str) -> None:
    layout, old, new = step
    with tempfile.TemporaryDirectory() as directory:
        checkpoint, path = Path(directory, "model.safetensors"), Path(directory, "weight_v000007")
        save_bits(checkpoint, layout, old)
        path.mkdir()
        changes = ((spec, old[spec.name], new[spec.name]) for spec in layout.tensors)
        save_delta(path, changes, Form(version=7, base_version=6, encoding=encoding, checksum=sums))

        engine = Engine(checkpoint, 6)
        engine.pull(path)

    assert engine.applied == 7
    assert engine.tensors() == as_bytes(new)


@settings(max_examples=tried(60))
@given(place=st.integers(0, 1 << 20), bit=st.integers(0, 7), length=st.none() | st.integers(0, 1 << 12))
def test_no_damaged_byte_changes_the_weights(place: int, bit: int, length: int | None) -> None:
    # Given a delta, one bit of one of its files, and perhaps all from there on
    with tempfile.TemporaryDirectory() as directory:
        path, layout, old = some(Path(directory))
        file = sorted(path.iterdir())[place % 2]
        data = bytearray(file.read_bytes())
        data[place % len(data)] ^= 1 << bit
        file.write_bytes(data[:length])

        # When it is read, then it is refused, or the bits are right
        try:
            delta = open_delta(path)
            if delta is None:
                assert file.name == INDEX and holds_changes(open_checkpoint(path))
                return
            found = new_bits(delta, layout, old)
        except (InputError, LayoutMismatch, DigestMismatch):
            return
        assert {name: flat.tolist() for name, flat in found.items()} == {
            name: (flat + np.uint16(1)).tolist() for name, flat in old.items()
        }


def some(directory: Path) -> tuple[Path, Layout, dict[str, Any]]:
    """A delta of five tensors, with its layout and base."""
    layout = Layout(tuple(TensorSpec(f"t{number}", "bfloat16", (8, 8)) for number in range(5)))
    old = {spec.name: np.arange(64, dtype="<u2") for spec in layout.tensors}
    new = {name: flat + np.uint16(1) for name, flat in old.items()}
    path = directory / "weight_v000003"
    path.mkdir()
    save_delta(
        path, [(spec, old[spec.name], new[spec.name]) for spec in layout.tensors], Form(version=3, base_version=1)
    )
    return path, layout, old


def test_large_deltas_are_several_files_that_the_library_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_delta, "FILE_BYTES_MAX", 60)
    path, layout, old = some(tmp_path)

    files = sorted(path.glob("*.safetensors"))
    assert len(files) > 1
    names: list[str] = []
    for file in files:
        with safe_open(file, "numpy") as opened:
            names += opened.keys()
            assert opened.metadata().keys() == set(opened.keys())
    assert sorted(names) == [spec.name for spec in layout.tensors]
    delta = open_delta(path)
    assert delta is not None and len(new_bits(delta, layout, old)) == 5


def test_a_tensor_whose_bytes_cannot_be_counted_is_refused_in_overwrite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_delta, "POSITION_MAX", 3)
    spec = TensorSpec("wide", "float32", (1,))
    change = [(spec, np.zeros(1, "<u4"), np.ones(1, "<u4"))]
    with pytest.raises(InputError, match=r"wide float32\[1\] has 4 bytes.*write it with 'xor'"):
        save_delta(tmp_path, change, Form(version=1, base_version=0, encoding="overwrite"))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="there is no encoding 'xorr' of deltas: did you mean xor"):
        Form(version=1, base_version=0, encoding="xorr")
    with pytest.raises(ConfigError, match="there is no checksum 'md5' of deltas"):
        Form(version=1, base_version=0, checksum="md5")


def test_checksums_of_another_package_need_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a delta whose checksums are blake3's
    def hashed(data: Any) -> Any:
        return SimpleNamespace(hexdigest=lambda: f"blake3 of {bytes(data).hex()}")

    monkeypatch.setitem(sys.modules, "blake3", SimpleNamespace(blake3=hashed))
    spec, old, new = TensorSpec("w", "uint8", (2,)), np.zeros(2, "u1"), np.ones(2, "u1")
    save_delta(tmp_path, [(spec, old, new)], Form(version=1, base_version=0, checksum="blake3"))

    # Then the package's checksums are those that count
    delta = open_delta(tmp_path)
    assert delta is not None and delta.checksums == {"w": "blake3 of 0101"}
    assert new_bits(delta, Layout((spec,)), {"w": old})["w"].tolist() == [1, 1]
    with pytest.raises(DigestMismatch):
        new_bits(delta, Layout((spec,)), {"w": new})

    # And without it the delta is refused
    monkeypatch.setitem(sys.modules, "blake3", None)
    with pytest.raises(ConfigError, match="pip install blake3"):
        open_delta(tmp_path)


@pytest.mark.parametrize(
    ("index", "says"),
    [
        (
            b'{"weight_map": {\n "w"',
            "cannot be read: not JSON: it is cut off at line 2, column 5. The file is ",
        ),
        (b"{}", "cannot be read: it has no weight_map, which says where each tensor is. The file is damaged, "),
        (b'{"weight_map": ["w"]}', "cannot be read: it has no weight_map, "),
    ],
)
def test_an_index_that_cannot_be_read_is_named_with_what_is_wrong(tmp_path: Path, index: bytes, says: str) -> None:
    (tmp_path / INDEX).write_bytes(index)
    with pytest.raises(InputError) as refused:
        open_checkpoint(tmp_path)
    assert str(refused.value).startswith(f"{tmp_path / INDEX} {says}")
    with pytest.raises(InputError, match="none cannot be read: No such file or directory"):
        open_checkpoint(tmp_path / "none")
