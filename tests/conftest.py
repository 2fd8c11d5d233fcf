"""What holds for every test: devices, and how hypothesis searches.

- A test is skipped only for a missing GPU. A missing broker is a failure: it is bundled.
- Fixtures live beside the tests that use them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("house", deadline=None, print_blob=True)  # deadlines measure the machine, not the code
settings.load_profile("house")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests where there is no NVIDIA device."""
    if Path("/dev/nvidiactl").exists():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU on this machine"))
