"""Everything that is installed is known before: by version, digest and licence; hooks by commit."""

from __future__ import annotations

import importlib.util
import re
import resource
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
LOCK = ROOT / "deploy" / "lock"
LISTS = {"accepted.txt", "licences.txt"}
LOCKS = sorted(path.name for path in LOCK.glob("*.txt") if path.name not in LISTS)
ENTRY = re.compile(r"([\w.-]+)==\S+(?: ; .+)?((?: --hash=sha256:[0-9a-f]{64})+)")
INCLUDES = {"-r torch.txt", "-r torch-cpu.txt"}


def entries(name: str) -> list[str]:
    """The requirements in a lock file, each on one line."""
    text = re.sub(r" \\\n +", " ", (LOCK / name).read_text("utf-8"))
    return [line for line in text.splitlines() if line and not line.startswith("#") and line not in INCLUDES]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"lock_{name}", LOCK / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", LOCKS)
def test_each_pin_has_a_digest(name: str) -> None:
    found = entries(name)
    assert found
    assert [line for line in found if not ENTRY.fullmatch(line)] == []


def test_torch_is_the_same_everywhere() -> None:
    pins = {name: entries(name)[0].split()[0] for name in ("torch.txt", "torch-cpu.txt")}
    assert pins["torch-cpu.txt"] == pins["torch.txt"] + "+cpu"


def test_each_package_has_a_licence_that_is_expected() -> None:
    lines = [line for line in (LOCK / "licences.txt").read_text("utf-8").splitlines() if not line.startswith("#")]
    pinned = {found[1] for name in LOCKS for line in entries(name) if (found := ENTRY.fullmatch(line))}
    assert {line.split(" ", 1)[0] for line in lines} == pinned
    assert load("licences").unexpected(lines) == []


@pytest.mark.parametrize("licence", ["unknown", "GPL-3.0-only", "MIT AND AGPL-3.0-only", ""])
def test_a_licence_that_nobody_has_read_is_named(licence: str) -> None:
    line = f"somebody {licence}"
    assert load("licences").unexpected(["# a comment", "other MIT AND (Apache-2.0 OR BSD-3-Clause)", line]) == [line]


def test_a_lock_that_cannot_be_written_whole_is_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    relock = load("relock")
    monkeypatch.setattr(relock, "HERE", tmp_path)
    (tmp_path / "demo.txt").write_text("# what it is\na==1\n")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            relock.write("demo.txt", "b==2\n" * 9)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.read_text() for path in tmp_path.iterdir()] == ["# what it is\na==1\n"]


def test_nothing_is_installed_from_a_lock_without_its_digests() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert re.search(r"^LOCKED := .*--require-hashes", makefile, re.MULTILINE)
    installs = [line for line in makefile.splitlines() if "-r deploy/lock/" in line]
    assert installs
    assert [line for line in installs if "$(LOCKED)" not in line] == []


def test_hooks_from_elsewhere_are_named_by_commit() -> None:
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"]
    revisions = [each["rev"] for each in repositories if each["repo"] != "local"]
    assert revisions
    assert [rev for rev in revisions if not re.fullmatch("[0-9a-f]{40}", rev)] == []


FAULTY = {"name": "some", "version": "1", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2"]}]}
SOUND = {"name": "other", "version": "1", "vulns": []}
UNKNOWN = {"name": "third", "skip_reason": "not found"}


@pytest.mark.parametrize(
    ("answer", "code", "said"),
    [
        ([SOUND], 0, "1 packages asked for, 0 known faults"),
        ([SOUND, FAULTY], 1, "some 1: PYSEC-1, mended in ['2']"),
        ([SOUND, UNKNOWN], 0, "not reached for third"),
    ],
)
def test_a_known_fault_ends_the_audit(
    answer: list[object], code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    audit = load("audit")
    monkeypatch.setattr(audit, "ask", lambda _lock, _ignored: answer)
    with pytest.raises(SystemExit) as ended:
        audit.main()
    assert ended.value.code == code
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("answer", [None, [UNKNOWN]])
def test_an_audit_that_reached_nobody_says_so_and_passes(
    answer: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    audit = load("audit")
    monkeypatch.setattr(audit, "ask", lambda _lock, _ignored: answer)
    audit.main()
    assert capsys.readouterr().out.startswith("audit: not reached")


def test_all_locks_are_audited() -> None:
    audited = {f"{name}.txt" for name in load("audit").LOCKS}
    assert audited == set(LOCKS) - {"torch-cpu.txt"}  # the same version as deploy/lock/torch.txt's


def test_a_fault_is_accepted_with_a_reason_only() -> None:
    audit = load("audit")
    assert audit.accepted("# a comment\nPYSEC-1 only its server is at fault\n") == ["PYSEC-1"]
    with pytest.raises(ValueError, match="PYSEC-2"):
        audit.accepted("PYSEC-2\n")
    audit.accepted((LOCK / "accepted.txt").read_text("utf-8"))
