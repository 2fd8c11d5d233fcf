"""No code comes in by data: nothing is unpickled, evaluated or imported but what the operator of a process named.

The source itself is searched. A place that must do such a thing is listed here with its reason, and only there.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
ROOMS = ("fabric", "workers", "trainer", "api", "deploy")

MODULES = frozenset(
    "pickle cPickle _pickle marshal shelve dill cloudpickle joblib jsonpickle yaml runpy code codeop imp xmlrpc".split()
)
CALLS = frozenset({"eval", "exec", "compile", "__import__", "os.system", "os.popen"})
METHODS = frozenset(
    {
        "import_module",
        "exec_module",
        "load_module",
        "run_path",
        "run_module",
        "read_pickle",
        "enable_load_extension",
    }
)
NEEDED = {  # call → the argument that makes it harmless
    "torch.load": ("weights_only", True),
    "from_pretrained": ("trust_remote_code", False),
    "np.load": ("allow_pickle", False),
    "numpy.load": ("allow_pickle", False),
}

CHAT = "a constant of the package verifiers, which the operator installed: the text of its chat loop"
ALLOWED = {
    ("deploy/main.py", "import_module"): "constants: the modules of the commands",
    ("src/rollfab/__init__.py", "import_module"): "constants: `connect` and `aio` are loaded when first used",
    ("workers/environments/registry.py", "import_module"): "targets of --environment and --reward of this very process",
    ("workers/environments/registry.py", "point.load"): "entry points of packages that the operator installed",
    (
        "workers/environments/process_main.py",
        "import_module",
    ): "a target of the registry of the process that started it",
    ("workers/environments/process_main.py", "exec_module"): "a constant: the file verifiers_plugin.py beside it",
    ("workers/environments/verifiers_plugin.py", "compile"): CHAT,
    ("workers/environments/verifiers_plugin.py", "exec"): CHAT,
    (
        "workers/engines/vllm/step/scheduler.py",
        "import_module",
    ): "rules that the engine's own process was started with, by code: no option or message names one",
    (
        "workers/engines/vllm/step/serving_probe.py",
        "import_module",
    ): "constants: parts of vLLM that the probe looks for",
    ("fabric/inspect/disk_delta.py", "import_module"): "a constant: the package blake3, which need not be installed",
    ("workers/environments/games/guess_the_number.py", "import_module"): "constants: parts of the package gem",
}


def findings(path: Path) -> Iterator[tuple[str, str]]:
    """What a file does that could run code which came as data, as (file, what)."""
    name = str(path.relative_to(ROOT))
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, (ast.Import, ast.ImportFrom, ast.Call)):
            for what in _calls(node) if isinstance(node, ast.Call) else _imports(node):
                yield name, what


def _imports(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name.split(".")[0] in MODULES)
    elif node.level == 0 and (node.module or "").split(".")[0] in MODULES:
        yield node.module or ""


def _calls(node: ast.Call) -> Iterator[str]:
    text = _dotted(node.func)
    last = text.rsplit(".", 1)[-1]
    if text in CALLS or text.startswith("builtins.") or last in METHODS:
        yield last
    if text.endswith(("point.load", "entry_point.load")):
        yield text
    for call, (argument, value) in NEEDED.items():
        if text == call or ("." not in call and last == call):
            given = {each.arg: each.value for each in node.keywords}.get(argument)
            if not (isinstance(given, ast.Constant) and given.value is value):
                yield f"{last} without {argument}={value}"
    if any(each.arg == "shell" and not _is_false(each.value) for each in node.keywords):
        yield "shell="


def _dotted(function: ast.expr) -> str:
    """What is called, without what stands in front of the last names."""
    if isinstance(function, ast.Attribute):
        return f"{_dotted(function.value)}.{function.attr}"
    return function.id if isinstance(function, ast.Name) else "()"


def _is_false(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is False


def _sources() -> list[Path]:
    found = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    return [*found, *sorted((ROOT / "src" / "rollfab").glob("*.py"))]


def test_nothing_is_unpickled_evaluated_or_imported_but_what_is_listed() -> None:
    sources = _sources()
    assert len(sources) > 100
    found = {finding for path in sources for finding in findings(path)}
    unknown = found - set(ALLOWED)
    assert not unknown, f"these may run code that comes as data: {sorted(unknown)}; do without, or give a reason above"
    assert not set(ALLOWED) - found, f"no longer done, take it off the list: {sorted(set(ALLOWED) - found)}"


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("import pickle", True),
        ("from dill import loads", True),
        ("import concurrent, marshal", True),
        ("eval(text)", True),
        ("builtins.exec(text)", True),
        ("importlib.import_module(name)", True),
        ("import_module(name)", True),
        ("__import__(name)", True),
        ("torch.load(path)", True),
        ("torch.load(path, weights_only=False)", True),
        ("np.load(path, allow_pickle=True)", True),
        ("AutoModel.from_pretrained(name)", True),
        ("AutoModel.from_pretrained(name, trust_remote_code=anything)", True),
        ("os.system(line)", True),
        ("subprocess.run(line, shell=True)", True),
        ("subprocess.run(line, shell=is_easy)", True),
        ("entry_point.load()", True),
        ("torch.load(path, weights_only=True)", False),
        ("model.eval()", False),
        ("re.compile(text)", False),
        ("AutoModel.from_pretrained(name, trust_remote_code=False)", False),
        ("from .code import x", False),
        ("subprocess.run(words)", False),
        ("json.load(file)", False),
    ],
)
def test_the_search_finds_what_loads_code_and_nothing_else(
    line: str, is_found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    (tmp_path / "x.py").write_text(f"def f():\n    {line}\n")
    assert bool(list(findings(tmp_path / "x.py"))) is is_found
