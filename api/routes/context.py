"""The context that the routes of one application share."""

from __future__ import annotations

from dataclasses import dataclass

from ...fabric.model.shown_tokens import Tokenizers
from ..access.config import ApiConfig
from ..metrics.scrape import Scraper
from ..reading.events import EventTail
from ..reading.status import Ports, StatusReader
from ..reading.weights import WeightReader


@dataclass(frozen=True, kw_only=True)
class Context:
    """What routes share; made once per application, by `make_app`."""

    ports: Ports
    config: ApiConfig
    tail: EventTail
    weights: WeightReader
    status: StatusReader
    scraper: Scraper
    tokenizers: Tokenizers
