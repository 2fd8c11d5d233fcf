"""What simulated runs share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_logging() -> Iterator[None]:
    """No thousands of warnings about faults that are meant."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
