"""Write deploy/lock/licences.txt, the licence of each package in lock/, from the index: a part of `make lock`.

- Runs in .venv-audit, whose pip knows licence expressions (PEP 639).
- A package that states none, or only by its text, and one that this machine does not install, has a line in STATED.
- A licence that EXPECTED lacks ends it: read the licence, then add it or leave the package out.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from rollfab.fabric.host.directories import replacing

HERE = Path(__file__).parent
LIST = HERE / "licences.txt"
ELSEWHERE = {"torch-cpu.txt", "accepted.txt", LIST.name}  # torch-cpu.txt: the same torch as torch.txt's
STATED = {
    "async-timeout": "Apache-2.0",
    "cuda-toolkit": "LicenseRef-NVIDIA-Proprietary",
    "openai-harmony": "Apache-2.0",
    "oss-harmony": "Apache-2.0",
    "prime-pydantic-config": "Apache-2.0",
    "prometheus-fastapi-instrumentator": "ISC",
    "promql-parser": "MIT",
    "protobuf-py-ext": "Apache-2.0",  # of the same repository as protobuf-py, which states it
    "setuptools": "MIT",
    "skyrl": "Apache-2.0",
    "taskiq-dependencies": "MIT",
    "tiktoken": "MIT",
    "zss": "BSD-3-Clause",
}
NAMES = {  # names beside SPDX' own
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD",
    "BSD-derived (http://www.repoze.org/LICENSE.txt)": "BSD",
    "GNU Lesser General Public License v3 or later (LGPLv3+)": "LGPL-3.0-or-later",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "MIT style": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "NVIDIA Proprietary Software": "LicenseRef-NVIDIA-Proprietary",
    "Python Software Foundation License": "PSF-2.0",
    "The Unlicense (Unlicense)": "Unlicense",
}
FREE = (
    "0BSD Apache-2.0 BSD BSD-2-Clause BSD-3-Clause BSL-1.0 CC0-1.0 CNRI-Python ISC MIT MIT-0 MIT-CMU PSF-2.0 Unlicense"
)
EXPECTED = {
    *FREE.split(),
    "Apache-2.0 WITH LLVM-exception",
    "MPL-2.0",  # by file: what is changed in such a file is open too; nothing is
    "LGPL-2.1-only",  # pycountry, which vLLM needs; imported, not changed
    "LGPL-3.0-or-later",  # dramatiq, for one bench
    "GPL-3.0",  # hadolint: a program that a test runs, neither linked nor shipped
    "LicenseRef-NVIDIA-Proprietary",  # CUDA, with PyPI's torch alone
}
CLASSIFIER = re.compile(r"License :: (?:OSI Approved :: )?(.+)")
SAYS_NOTHING = {"OSI Approved", "DFSG approved", "Other/Proprietary License"}
PARTS = re.compile(r"[() ]*(?: AND | OR )[() ]*")


def licence_of(metadata: dict[str, object]) -> str:
    """The licence that a package states, in short; "unknown" if it states nothing that fits a line."""
    if expression := metadata.get("license_expression"):
        return str(expression)
    classifiers = [str(each) for each in metadata.get("classifier") or []]  # type: ignore[attr-defined]
    text = str(metadata.get("license") or "")
    named = {found[1].removeprefix("OSI Approved :: ") for each in classifiers if (found := CLASSIFIER.fullmatch(each))}
    said = named - SAYS_NOTHING or {text.splitlines()[0] if text else "unknown"}
    return " AND ".join(sorted(NAMES.get(each, each) for each in said))


def read(lock: Path) -> dict[str, str]:
    """Licence by package, as the index has it for the pins in one lock file.

    Raises:
        CalledProcessError: an index cannot be reached.
    """
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "-qq"]
    report = subprocess.run([*command, "--report", "-", "-r", str(lock)], check=True, stdout=subprocess.PIPE)
    found = [each["metadata"] for each in json.loads(report.stdout)["install"]]
    by_name = {re.sub(r"[-_.]+", "-", each["name"]).lower(): licence_of(each) for each in found}
    names = re.findall(r"^([\w.-]+)==", lock.read_text(), re.MULTILINE)
    return by_name | {name: STATED[name] for name in names if name in STATED}


def unexpected(lines: list[str]) -> list[str]:
    """The lines with a licence, or a part of one, that EXPECTED lacks."""
    return [
        line
        for line in lines
        if not line.startswith("#") and not EXPECTED.issuperset(PARTS.split(line.partition(" ")[2].strip("() ")))
    ]


def main() -> None:
    licences: dict[str, str] = {}
    for lock in sorted(HERE.glob("*.txt")):
        if lock.name not in ELSEWHERE:
            licences |= read(lock)
    lines = [f"{name} {licence}" for name, licence in sorted(licences.items())]
    if wrong := unexpected(lines):
        raise SystemExit("not expected (see deploy/lock/licences.py):\n" + "\n".join(wrong))
    with replacing(LIST) as new:
        new.write_text("# The licence of each package in lock/. Written by `make lock`.\n" + "\n".join(lines) + "\n")
    print(f"lock/{LIST.name}: {len(lines)} packages")


if __name__ == "__main__":
    main()
