"""The real verl on a CPU, with its real TransferQueue on ray: settings for every test here, made before verl is
imported.
"""

import os
import warnings
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace

os.environ.update(
    {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "VERL_USE_EXTERNAL_MODULES": "rollfab.trainer.integrations.verl_weights",
    }
    if find_spec("verl")
    else {}
)

import pytest

import rollfab
from rollfab.deploy.local import supervisor
from tests.support.processes.fabric_processes import PYTHONPATH, ROOT, Processes, processes

WORLDS = "tests.support.worlds.worlds"
HAS_VERL = find_spec("verl") is not None
ACTOR_COUNT_MAX = 4  # that take a core by name: TransferQueue's three. ray starts a process for each core ahead

if HAS_VERL:
    with warnings.catch_warnings(action="ignore"):  # its own are not ours, and would end the collection
        import_module("tests.verl.training")

# In the other environment there is nothing to collect here; `make test-all` runs these in .venv-verl, where there is.
collect_ignore_glob = [] if HAS_VERL else ["*test_*.py"]


@pytest.fixture(scope="session")
def transfer_queue() -> Iterator[None]:
    """verl's own queue, in processes of ray."""
    import ray
    import transfer_queue

    ray.init(
        num_cpus=ACTOR_COUNT_MAX,
        include_dashboard=False,
        object_store_memory=100 << 20,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": PYTHONPATH}},
    )
    transfer_queue.init()
    yield
    transfer_queue.close()
    ray.shutdown()


@pytest.fixture(scope="session")
def roles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """One fabric for all tests here, whose roles run in .venv, as verl's transformers is too old for a worker's."""
    python = SimpleNamespace(executable=str(ROOT / ".venv" / "bin" / "python"))
    with pytest.MonkeyPatch.context() as patch, processes(tmp_path_factory.mktemp("verl")) as fabric:
        patch.setattr(supervisor, "sys", python)
        fabric.fabric.close()
        names = ("--environment", f"walk={WORLDS}:Walk", "--environment", f"broken={WORLDS}:Broken")
        fabric.start_roles(agent=names, worker=("--slots", "32"))
        yield fabric


@pytest.fixture(scope="module")
def fabric(roles: Processes, transfer_queue: None) -> Iterator[Processes]:
    """That fabric, with a client for this module."""
    roles.fabric = rollfab.connect(roles.url)
    yield roles
    roles.fabric.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Warnings of verl and what it imports are not ours; it takes long to import."""
    for item in items:
        if "tests/verl" in str(item.path):
            item.add_marker(pytest.mark.filterwarnings("default"))
            item.add_marker(pytest.mark.redis)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(120))
