"""Print `-r deploy/lock/cuda.txt` where the torch that is installed asks for CUDA's packages: PyPI's build for Linux
does.
"""

from importlib.metadata import requires

if any(need.startswith(("nvidia-", "cuda-")) for need in requires("torch") or ()):
    print("-r deploy/lock/cuda.txt")
