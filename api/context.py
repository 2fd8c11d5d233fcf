"""What the routes of one application share."""

from __future__ import annotations

from dataclasses import dataclass

from .config import ApiConfig
from .events import EventTail
from .status import Ports, StatusReader
from .weights import WeightReader


@dataclass(frozen=True, kw_only=True)
class Context:
    """Made once per application, by `make_app`."""

    ports: Ports
    config: ApiConfig
    tail: EventTail
    weights: WeightReader
    status: StatusReader
