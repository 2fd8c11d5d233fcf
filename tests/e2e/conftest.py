"""What tests of the live page share: a broker, an api before it that has a controller, and a real browser."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from rollfab.fabric.broker.embedded import EmbeddedBroker
from tests.e2e.chromium import Browser, open_browser
from tests.support.processes.api_server import ApiWorld, running_api


@pytest.fixture(scope="module")
def broker_url() -> Iterator[str]:
    with EmbeddedBroker.start() as broker:
        yield broker.url


@pytest.fixture
async def browser(tmp_path: Path) -> AsyncIterator[Browser]:
    async with open_browser(tmp_path) as found:
        yield found


@pytest.fixture
async def api(broker_url: str) -> AsyncIterator[ApiWorld]:
    async with running_api(broker_url) as world:
        await world.beat("controller-1", "controller")
        yield world


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Where pictures of the page are left for people to look at: $PICTURES, or the test's own directory."""
    found = Path(os.environ.get("PICTURES") or tmp_path / "pictures")
    found.mkdir(exist_ok=True)
    return found
