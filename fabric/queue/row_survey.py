"""Looks through the whole broker for rows that cannot be read, and removes one: for people, not for loops.

- Looks at every key and its type, up to KEY_COUNT_MAX, and at about the first ROW_COUNT_MAX rows of each table. The
  answer names the tables that were read in part. Tables that a run has once come before those that it has many of.
- Removes a row only if it cannot be read at that moment, and only by its exact name.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from ..broker.clients.cluster_client import ClusterClient
from ..contract.errors import FabricError
from ..contract.text import one_line
from ..ports.queue import BAD_ROW_COUNT_MAX, BadRow, RowSurvey
from . import keys as names
from .rows import shown_name
from .tables import Table, table_at

KEY_COUNT_MAX = 1_000_000
TABLE_COUNT_MAX = 10_000  # whose rows are read
ROW_COUNT_MAX = 1000  # of a table
BYTES_MAX = 64 << 20  # of a table
PAGE_COUNT = 100
LISTED_COUNT_MAX = 200_000  # of a table that is read at once, to remove a row: more than any of ours may hold
ENDLESS = 1 << 60

Found = tuple[bytes, Table, str]  # key, its table, and the type that it has


async def survey_rows(client: Any, tables: Sequence[str] = ()) -> RowSurvey:
    """List rows that cannot be read, at most BAD_ROW_COUNT_MAX; in these tables, or in all."""
    found: list[BadRow] = []
    cut: list[str] = []
    row_count = 0
    named = [names.key_of(table).encode() for table in tables]
    keys, is_whole = (await _typed(client, named), True) if named else await _keys(client)
    for number, (key, table, kind) in enumerate(keys):
        if kind == "none":
            continue
        if kind != table.kind:
            found.append(BadRow(names.table_of(key), "", wrong_type(kind, table.kind)))
        elif table.check is not None and number < TABLE_COUNT_MAX:
            count = size = 0
            async for name, value in _rows(client, key, kind, ROW_COUNT_MAX + 1):
                count, size = count + 1, size + _size(value)
                if count > ROW_COUNT_MAX or size > BYTES_MAX:
                    cut.append(names.table_of(key))
                    break
                if problem := _problem(table, name, value):
                    found.append(BadRow(names.table_of(key), shown_name(name), problem))
            row_count += count
        elif table.check is not None:
            is_whole = False
        if len(found) >= BAD_ROW_COUNT_MAX:
            is_whole = False
            break
    return RowSurvey(
        bad_rows=found[:BAD_ROW_COUNT_MAX], table_count=len(keys), row_count=row_count, cut=cut, is_whole=is_whole
    )


async def remove_row(client: Any, row: BadRow) -> bool:
    """Remove a row that cannot be read; return False if it is gone already, or can be read."""
    key = names.key_of(row.table).encode()
    found = [each for each in (await _typed(client, [key])) if each[2] != "none"]
    if not found:  # a key whose stored name differs from the shown one
        found = [each for each in (await _keys(client))[0] if names.table_of(each[0]) == row.table]
    for key, table, kind in found:
        if kind != table.kind:
            return not row.row and bool(await client.unlink(key))
        async for name, value in _rows(client, key, kind, ENDLESS):
            if shown_name(name) == row.row and _problem(table, name, value):
                return bool(await _remove(client, key, kind, name))
    return False


async def _remove(client: Any, key: bytes, kind: str, name: bytes) -> int:
    removing = {"hash": client.hdel, "zset": client.zrem, "stream": client.xdel, "set": client.srem}
    if kind == "string":
        return int(await client.unlink(key))
    return int(await (client.lrem(key, 0, name) if kind == "list" else removing[kind](key, name)))


def wrong_type(kind: str, wanted: str) -> str:
    """Say what is wrong with a table of another type."""
    return f"it is a {kind}, and should be a {wanted}"


def _problem(table: Table, name: bytes, value: Any) -> str:
    """Say why a row cannot be read; empty if it can."""
    try:
        if table.check is not None:
            table.check(table.run, name, value)
    except (FabricError, ValueError, OverflowError) as error:
        return one_line(str(error))
    return ""


def _size(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(len, value.values()))
    return len(value) if isinstance(value, bytes) else 0


async def _keys(client: Any) -> tuple[list[Found], bool]:
    """List every key that is a table of ours, and say whether these are all."""
    servers = client.primaries() if isinstance(client, ClusterClient) else [client]
    seen: set[bytes] = set()
    for server in servers:
        async for key in server.scan_iter(count=1000):
            if len(seen) >= KEY_COUNT_MAX:
                break
            if key.startswith((b"rf:{", b"rq:")):
                seen.add(key)
    ordered = sorted(seen)
    found = [each for at in range(0, len(ordered), 1000) for each in await _typed(client, ordered[at : at + 1000])]
    found.sort(key=lambda each: each[0].count(b":"))  # "rf:{r.0}:counters" before "rf:{r.0}:group:g1"
    return found, len(seen) < KEY_COUNT_MAX


async def _typed(client: Any, keys: list[bytes]) -> list[Found]:
    tables = [(key, table) for key in keys if (table := table_at(key.decode("utf-8", "backslashreplace"))) is not None]
    pipeline = client.pipeline(transaction=False)
    for key, _ in tables:
        pipeline.type(key)
    kinds = await pipeline.execute() if tables else []
    return [(key, table, kind.decode()) for (key, table), kind in zip(tables, kinds, strict=True)]


async def _rows(client: Any, key: bytes, kind: str, count: int) -> AsyncIterator[tuple[bytes, Any]]:
    """Yield a table's rows as name and value."""
    if kind not in ("hash", "set"):
        for row in await _listed(client, key, kind, min(count, LISTED_COUNT_MAX)):
            yield row
        return
    scan, cursor = (client.hscan if kind == "hash" else client.sscan), -1
    while cursor:
        cursor, page = await scan(key, max(0, cursor), count=PAGE_COUNT)
        for name in page:
            yield name, page[name] if kind == "hash" else None


async def _listed(client: Any, key: bytes, kind: str, count: int) -> list[tuple[bytes, Any]]:
    if kind == "string":
        raw = await client.get(key)
        return [] if raw is None else [(b"", raw)]
    if kind == "stream":
        return [(entry_id, fields or {}) for entry_id, fields in await client.xrevrange(key, count=count)]
    if kind == "zset":
        return list(await client.zrange(key, 0, count - 1, withscores=True))
    return [(name, None) for name in await client.lrange(key, 0, count - 1)]
