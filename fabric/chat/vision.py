"""What a model makes of images: how many tokens stand for one, and the arrays that it reads instead of them.

- Engines and trainers make the arrays by the same code, of the same bytes: the model's own image processor, its Pillow
  form, which is there with and without torchvision. Equal versions of transformers and Pillow make equal bits.
- Families whose tokens in a row are all one token: Qwen2-VL and Qwen2.5-VL. Other models that see are refused by name.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from ..contract.errors import ConfigError, InputError
from ..contract.limits import IMAGE_BYTES_MAX, IMAGE_PIXELS_MAX

FAMILIES = ("qwen2_vl", "qwen2_5_vl")
FORMATS = ("PNG", "JPEG", "WEBP")


class Vision:
    """The eyes of one model.

    token_id: the token that stands for a piece of an image, as often as it has pieces.
    """

    def __init__(self, processor: Any, token_id: int) -> None:
        self.token_id = token_id
        self._processor = processor
        self._merged_count = int(processor.merge_size) ** 2

    def token_count(self, data: bytes) -> int:
        """Return how many tokens stand for an image; read the head of its file alone. Raises InputError, as `size`."""
        width, height = size(data)
        try:
            count: int = self._processor.get_number_of_image_patches(height, width, {})
        except ValueError as error:  # longer than 200 times its width, say
            raise InputError(f"the model takes no image of {width:,} x {height:,} pixels: {error}") from error
        return count // self._merged_count

    def arrays(self, images: Sequence[bytes]) -> Mapping[str, NDArray[Any]]:
        """Return what the model reads of some images, at least one, by its own names.

        pixel_values: float32 (N, D), the pieces of all images one after another. image_grid_thw: int64 (n, 3), how
        many pieces each has in time, height and width.

        Raises:
            InputError: the file of one cannot be read.
        """
        from PIL import Image

        opened = []
        for data in images:
            size(data)
            try:
                opened.append(Image.open(io.BytesIO(data)).convert("RGB"))
            except (OSError, ValueError, SyntaxError) as error:
                raise InputError(f"an image of {len(data):,} bytes cannot be read: {error}") from error
        made = self._processor(images=opened, return_tensors="np")
        return {"pixel_values": made["pixel_values"], "image_grid_thw": made["image_grid_thw"]}


def find_vision(model: str) -> Vision | None:
    """Load the eyes of a model on this machine; None: it has none.

    Args:
        model: a directory, or a hub name whose files lie in the library's cache.

    Raises:
        ConfigError: it sees, but is of another family, or its image processor cannot be loaded.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError):  # a tokenizer alone, or a model that this library does not know
        return None
    if getattr(config, "vision_config", None) is None:
        return None
    if config.model_type not in FAMILIES:
        raise ConfigError(
            f"model {model!r} takes images, and is of the family {config.model_type}: images are taken for "
            f"{' and '.join(FAMILIES)} alone. Send it text",
            model=model,
        )
    from transformers import AutoImageProcessor

    try:
        processor = AutoImageProcessor.from_pretrained(
            model, backend="pil", trust_remote_code=False, local_files_only=True
        )
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(
            f"model {model!r} takes images, but its image processor cannot be loaded: {error}. Put its "
            "preprocessor_config.json beside it, and install Pillow",
            model=model,
        ) from error
    return Vision(processor, int(config.image_token_id))


def size(data: bytes) -> tuple[int, int]:
    """Return the width and height of an image in pixels. Reads the head of its file alone.

    Raises:
        InputError: it is none of FORMATS, or too large.
    """
    from PIL import Image

    if len(data) > IMAGE_BYTES_MAX:
        raise InputError(f"an image has {len(data):,} bytes, the limit is {IMAGE_BYTES_MAX:,}: send a smaller one")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
            width, height = opened.size
        if width * height > IMAGE_PIXELS_MAX:
            raise Image.DecompressionBombError(f"{width:,} x {height:,} pixels")
    except (OSError, ValueError, SyntaxError) as error:
        raise InputError(f"an image of {len(data):,} bytes is none of {', '.join(FORMATS)}, or damaged") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:  # the latter where it is an error
        raise InputError(f"an image is too large ({error}), the limit is {IMAGE_PIXELS_MAX:,} pixels") from error
    return width, height
