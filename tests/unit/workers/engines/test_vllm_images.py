"""Arrays of images that a vLLM's worker makes, and keeps for a while."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rollfab.fabric.chat.vision import Vision
from rollfab.fabric.contract.images import Image, digest_of
from rollfab.workers.engines.vllm.images import Eyes
from tests.unit.fabric.chat.world import png

PIXELS_BYTES = 16 * 1176 * 4  # of an image of 56 x 56: 16 pieces


class CountedVision(Vision):
    """Notes how many images it was shown."""

    count = 0

    def arrays(self, images: Sequence[bytes]) -> Mapping[str, Any]:
        self.count += len(images)
        return super().arrays(images)


def image(seed: int, start: int = 0) -> Image:
    data = png(seed, 56, 56)
    return Image(start=start, end=start + 4, digest=digest_of(data), data=data)


def test_an_image_is_read_once_while_there_is_room_for_it() -> None:
    # Given room for the arrays of two images
    vision = CountedVision(Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=28 * 28 * 12), 7)
    eyes = Eyes(vision, bytes_max=2 * PIXELS_BYTES)
    # When one of them is shown again, also within one context
    first, second, again = eyes.look([image(1), image(2, 4), image(1, 8)])
    eyes.look([image(2), image(1)])
    # Then each was read once, and a third takes the place of the one that was shown longest ago
    assert vision.count == 2
    eyes.look([image(3)])
    eyes.look([image(1), image(3)])
    assert vision.count == 3
    eyes.look([image(2)])
    assert vision.count == 4
    # And what is kept is what was made, at the places that were asked for
    assert [(each.start, each.end) for each in (first, second, again)] == [(0, 4), (4, 8), (8, 12)]
    assert again.pixel_values.shape == (16, 1176) and again.pixel_values.nbytes == PIXELS_BYTES
    made = vision.arrays([image(1).data])
    assert np.array_equal(again.pixel_values, made["pixel_values"])
    assert again.image_grid_thw.tolist() == made["image_grid_thw"][0].tolist() == [1, 4, 4]
