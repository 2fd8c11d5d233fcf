"""Breaks of the sources in ROOMS: comparisons, `and` and `or`, numbers, statements, returns and raises."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("fabric/queue", "fabric/rules", "fabric/versions", "workers/rollout")
SWAPS = "Eq NotEq|Lt GtE|Gt LtE|Is IsNot|In NotIn|And Or".split("|")
SWAPPED = {getattr(ast, a): getattr(ast, b) for pair in SWAPS for a, b in (pair.split(), pair.split()[::-1])}
LUA_TOKEN = re.compile(r"'[^']*'|--.*|(?P<word>==|~=|<=|>=|<|>|\band\b|\bor\b|(?<![\w.])\d+\b)")
LUA_SWAPPED = {"==": "~=", "~=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">", "and": "or", "or": "and"}


@dataclass(frozen=True)
class Mutant:
    """A broken line. lines: a test that runs one of them may find it."""

    path: str
    lines: range
    source: str
    change: str


def _mutants_of(path: str, source: str) -> Iterator[Mutant]:
    """Make every break of one file."""
    make = {"py": _python_mutants, "lua": _lua_mutants}.get(path.rpartition(".")[2])
    return make(path, source) if make else iter(())


def _python_mutants(path: str, source: str) -> Iterator[Mutant]:
    tree, raw = ast.parse(source), source.encode()
    starts = [0, *accumulate(map(len, raw.splitlines(keepends=True)))]
    skipped = {id(part) for node in ast.walk(tree) for root in _unbroken(node) for part in ast.walk(root)}
    for node in ast.walk(tree):
        if id(node) in skipped or (text := _broken(node)) is None:
            continue
        assert isinstance(node, (ast.expr, ast.stmt)) and node.end_lineno and node.end_col_offset
        begin, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        changed = (raw[:begin] + text.encode() + raw[end:]).decode()
        was = " ".join(raw[begin:end].decode().split())
        yield Mutant(path, range(node.lineno, node.end_lineno + 1), changed, f"{was} → {text}")


def _unbroken(node: ast.AST) -> Iterator[ast.AST]:
    """Find what of a node is not run, or stands where Python does not say: annotations, f-strings."""
    if isinstance(node, ast.JoinedStr):
        yield node
    for name in ("annotation", "returns"):
        if isinstance(found := getattr(node, name, None), ast.AST):
            yield found


def _broken(node: ast.AST) -> str | None:
    match node:
        case ast.Compare(left=left, ops=[op, *ops], comparators=rest):
            return f"({ast.unparse(ast.Compare(left, [SWAPPED[type(op)](), *ops], rest))})"
        case ast.BoolOp(op=op, values=values):
            return f"({ast.unparse(ast.BoolOp(SWAPPED[type(op)](), values))})"
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return repr(value + 1)
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            return "return None"
        case ast.Raise() | ast.AugAssign() | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return "pass"
        case ast.Expr(value=ast.Call() | ast.Await()) if not ast.unparse(node).startswith("log."):
            return "pass"
    return None


def _lua_mutants(path: str, source: str) -> Iterator[Mutant]:
    lines = source.splitlines(keepends=True)
    for index, line in enumerate(lines):
        for each in LUA_TOKEN.finditer(line):
            if word := each["word"]:
                text = LUA_SWAPPED.get(word) or str(int(word) + 1)
                changed = line[: each.start()] + text + line[each.end() :]
                yield _line_mutant(path, lines, index, changed, f"{word} → {text}: {line.strip()}")
        if re.match(r"\s*[\w.]+\(.*\)$", line):
            yield _line_mutant(path, lines, index, "\n", f"{line.strip()} → nothing")


def _line_mutant(path: str, lines: list[str], index: int, changed: str, change: str) -> Mutant:
    source = "".join([*lines[:index], changed, *lines[index + 1 :]])
    return Mutant(path, range(index + 1, index + 2), source, change)


def sources(*patterns: str) -> list[Path]:
    """List the files of ROOMS."""
    return sorted(each for room in ROOMS for pattern in patterns for each in (ROOT / room).rglob(pattern))


def drawn(count: int, seed: int, under: tuple[str, ...]) -> list[Mutant]:
    """Draw one break of each of `count` lines below some paths."""
    places: dict[tuple[str, int], list[Mutant]] = {}
    for path in sources("*.py", "*.lua"):
        if str(path.relative_to(ROOT)).startswith(under):
            for mutant in _mutants_of(str(path.relative_to(ROOT)), path.read_text()):
                places.setdefault((mutant.path, mutant.lines[0]), []).append(mutant)
    random = Random(seed)
    return [random.choice(places[place]) for place in random.sample(sorted(places), min(count, len(places)))]
