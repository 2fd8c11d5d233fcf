"""One broker with a user for each role, for each module; every test finds it empty."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.brokers.guarded_broker import Guarded, guarded_broker


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded_broker(tmp_path_factory.mktemp("acl")) as broker:
        yield broker


@pytest.fixture
def broker(guarded: Guarded) -> Guarded:
    guarded.admin.flushall()
    guarded.admin.acl_log_reset()
    return guarded
