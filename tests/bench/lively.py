"""Weights for benches that compare greedy turns token by token.

As it is made, the tiny preset writes one token again and again, whatever came before: a turn that went on from the
wrong tokens would look just like one that went on from its own.
"""

from __future__ import annotations

import numpy as np

SCALE = 10.0  # from here on every token hangs on all before it; gaps between logits stay far above rounding


def lively_weights(model: str = "tiny") -> dict[str, np.ndarray]:
    """A preset's weights, float32, with every matrix larger: greedy turns have some 80 different tokens."""
    from rollfab.workers.engines.transformers.model import load_model

    parameters = load_model(model, "float32", "cpu").named_parameters()
    return {name: each.detach().numpy() * np.float32(SCALE if each.ndim > 1 else 1) for name, each in parameters}
