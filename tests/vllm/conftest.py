"""Real vLLM on a CPU: settings for every test here, made before vllm is imported, and one import for all (about 6 s).

Engines are forked from this process, which is fast and works only as long as it has computed nothing with torch:
references are computed in processes of their own.
"""

import gc
import os
import warnings
from importlib.util import find_spec

os.environ.update(
    OMP_NUM_THREADS="1",
    TORCHDYNAMO_DISABLE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
    VLLM_LOGGING_LEVEL="WARNING",
)

import pytest

# In the other environment there is nothing to collect here; `make test-all` runs these in .venv-vllm, where there is.
collect_ignore_glob = [] if find_spec("vllm") else ["*test_*.py"]


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure() -> None:
    """vLLM leaves sockets' contexts to the garbage collector: it comes here, before pytest looks for what was left."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Unclosed context <zmq", ResourceWarning)
        gc.collect()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Warnings of vLLM and what it imports are not ours; an engine takes longer to start than a test's usual limit."""
    for item in items:
        if "tests/vllm" in str(item.path):
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.filterwarnings("default"))
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(120))
