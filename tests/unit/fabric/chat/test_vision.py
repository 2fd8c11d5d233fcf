"""The eyes of a model: which are found, and what is said of those that cannot be, and of images that are damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollfab.fabric.chat.vision import find_vision
from rollfab.fabric.contract.errors import ConfigError, InputError
from tests.support.seeing_model import write_seeing_model
from tests.unit.fabric.chat.world import png


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeing_model(tmp_path_factory.mktemp("model"))


def test_an_image_whose_end_is_missing_is_refused_by_name(model: Path) -> None:
    vision, data = find_vision(str(model)), png(1, 56, 56)
    assert vision is not None and vision.token_count(data[:-100]) == vision.token_count(data) == 4
    assert len(vision.arrays([data])["pixel_values"]) == 16
    with pytest.raises(InputError, match=f"an image of {len(data) - 100:,} bytes cannot be read"):
        vision.arrays([data[:-100]])


def test_eyes_that_cannot_be_used_are_refused_by_name_and_no_eyes_are_none(tmp_path: Path, model: Path) -> None:
    config = tmp_path / "config.json"
    assert find_vision(str(tmp_path)) is None
    config.write_text(json.dumps({"model_type": "qwen2"}))
    assert find_vision(str(tmp_path)) is None
    config.write_text(json.dumps({"model_type": "llava"}))
    with pytest.raises(ConfigError, match="of the family llava: images are taken for qwen2_vl and qwen2_5_vl alone"):
        find_vision(str(tmp_path))
    config.write_bytes((model / "config.json").read_bytes())
    with pytest.raises(ConfigError, match="its image processor cannot be loaded"):
        find_vision(str(tmp_path))
