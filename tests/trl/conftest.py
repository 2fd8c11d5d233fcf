"""The real TRL on a CPU: settings for every test here, made before trl is imported."""

import os
from collections.abc import Iterator
from importlib.util import find_spec

os.environ.update(
    {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "ACCELERATE_USE_CPU": "true",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if find_spec("trl")
    else {}
)

import pytest

import rollfab
from tests.support.processes.fabric_processes import Processes, processes

WORLDS = "tests.support.worlds.worlds"

# In the other environment there is nothing to collect here; `make test-all` runs these in .venv-trl, where there is.
collect_ignore_glob = [] if find_spec("trl") else ["*test_*.py"]


@pytest.fixture(scope="session")
def roles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """One fabric for all tests here: each has a run of its own."""
    with processes(tmp_path_factory.mktemp("trl")) as fabric:
        fabric.fabric.close()
        names = ("--environment", f"walk={WORLDS}:Walk", "--environment", f"broken={WORLDS}:Broken")
        fabric.start_roles(agent=names, worker=("--slots", "32"))
        yield fabric


@pytest.fixture(scope="module")
def fabric(roles: Processes) -> Iterator[Processes]:
    """That fabric, with a client for this module."""
    roles.fabric = rollfab.connect(roles.url)
    yield roles
    roles.fabric.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Warnings of TRL and what it imports are not ours; it takes long to import."""
    for item in items:
        if "tests/trl" in str(item.path):
            item.add_marker(pytest.mark.filterwarnings("default"))
            item.add_marker(pytest.mark.redis)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(240))
