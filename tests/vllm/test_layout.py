"""A layout learned without loading is that of the loaded model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rollfab.fabric.contract.errors import EngineError
from rollfab.fabric.format.layout import Layout
from rollfab.fabric.model.presets import model_config

# In a process of its own: engines are forked from this one, which must not compute with torch.
LOADED = """
import json, sys, torch, transformers
config = transformers.AutoConfig.from_pretrained(sys.argv[1])
made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
made.save_pretrained(sys.argv[1])
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=sys.argv[2])
print(json.dumps([[n, str(p.dtype).removeprefix("torch."), list(p.shape)] for n, p in model.named_parameters()]))
"""


@pytest.mark.parametrize(
    ("preset", "changes", "dtype"),
    [("tiny", {}, "float32"), ("small", {"tie_word_embeddings": False}, "bfloat16"), ("tiny", {}, "auto")],
)
def test_the_layout_is_that_of_the_loaded_model(
    tmp_path: Path, preset: str, changes: dict[str, bool], dtype: str
) -> None:
    from rollfab.workers.engines.vllm.common.layout import checkpoint_layout

    (tmp_path / "config.json").write_text(json.dumps({**model_config(preset), **changes, "dtype": "bfloat16"}))
    layout = checkpoint_layout(str(tmp_path), dtype)
    loaded = subprocess.run(
        [sys.executable, "-c", LOADED, str(tmp_path), dtype], check=True, capture_output=True, text=True
    )
    assert layout.rows() == Layout.from_rows(json.loads(loaded.stdout.splitlines()[-1])).rows()
    assert ("lm_head.weight" in {spec.name for spec in layout.tensors}) == bool(changes)


def test_a_directory_without_a_model_is_refused_by_name(tmp_path: Path) -> None:
    from rollfab.workers.engines.vllm.common.layout import checkpoint_layout

    with pytest.raises(EngineError, match=r"config\.json"):
        checkpoint_layout(str(tmp_path), "float32")
    with pytest.raises(EngineError, match="float33"):
        checkpoint_layout(str(tmp_path), "float33")
