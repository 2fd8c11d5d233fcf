"""What every model of an answer is."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Model(BaseModel):
    """Base of all answers; the line under a field is its description."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)
