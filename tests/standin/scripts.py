"""Runs the fabric's Lua scripts as Redis does, with Lua 5.1 in this process (lupa)."""

from __future__ import annotations

from hashlib import sha1
from typing import Any

from lupa.lua51 import LuaRuntime, lua_type
from redis.exceptions import ResponseError

from tests.standin.commands import COMMANDS, Words
from tests.standin.keyspace import Keyspace

# What a script sees: what Redis gives it, and no globals of its own. Errors of the broker are tables there.
PRELUDE = b"""
local call, try = ...
local seen = {
  redis = {call = call, pcall = try},
  string = string, math = math, table = table, pairs = pairs, ipairs = ipairs, next = next, select = select,
  tonumber = tonumber, tostring = tostring, type = type, unpack = unpack, error = error, pcall = pcall, assert = assert,
}
setmetatable(seen, {
  __newindex = function(_, name) error('Attempt to modify a global: ' .. name) end,
  __index = function(_, name) error('Script attempted to access nonexistent global variable ' .. name) end,
})
local function compile(source) return setfenv(assert(loadstring(source)), seen) end
local function run(script, keys, argv)
  rawset(seen, 'KEYS', keys)
  rawset(seen, 'ARGV', argv)
  return script()
end
return compile, run
"""


class Interpreter:
    """One Lua for all brokers of this process: scripts keep nothing."""

    def __init__(self) -> None:
        self._lua = LuaRuntime(encoding=None, register_eval=False, register_builtins=False)
        self._table = self._lua.table
        prelude = self._lua.compile(PRELUDE)
        self._compile, self._run = prelude(self._call, self._try)
        self._scripts: dict[bytes, Any] = {}
        self._space: Keyspace | None = None

    def load(self, source: bytes) -> bytes:
        """Returns its digest."""
        digest = sha1(source, usedforsecurity=False).hexdigest().encode()
        if digest not in self._scripts:
            head, _, text = source.partition(b"\n")
            assert head.startswith(b"#!lua"), "every script of the fabric begins so"
            self._scripts[digest] = self._compile(b"\n" + text)
        return digest

    def run(self, space: Keyspace, digest: bytes, words: Words) -> Any:
        """Run a script that was loaded. words: how many keys, keys, arguments.

        Raises:
            ResponseError: what it raised.
        """
        script = self._scripts[digest]
        count = int(words[0])
        self._space = space
        keys, argv = self._table(*words[1 : count + 1]), self._table(*words[count + 1 :])
        return self._from_lua(self._run(script, keys, argv))

    def _call(self, name: bytes, *words: Any) -> Any:
        assert self._space is not None
        return self._to_lua(COMMANDS[name.upper()](self._space, [self._word(word) for word in words]))

    def _try(self, name: bytes, *words: Any) -> Any:
        try:
            return self._call(name, *words)
        except ResponseError as error:
            return self._lua.table_from({b"err": str(error).encode()})

    @staticmethod
    def _word(value: Any) -> bytes:
        if type(value) is bytes:
            return value
        if type(value) is bool or not isinstance(value, (int, float)):
            raise ResponseError("ERR Lua redis lib command arguments must be strings or integers")
        return b"%d" % value if isinstance(value, int) or value == int(value) else b"%.17g" % value

    def _to_lua(self, answer: Any) -> Any:
        if answer is None:
            return False
        if type(answer) is list:
            return self._table(*[self._to_lua(each) for each in answer])
        if type(answer) is dict:
            return self._lua.table_from({name.encode(): value for name, value in answer.items()})
        return answer

    def _from_lua(self, value: Any) -> Any:
        kind = type(value)
        if kind is bytes or kind is int:
            return value
        if value is None or value is False:
            return None
        if value is True:
            return 1
        if kind is float:
            return int(value)
        assert lua_type(value) == "table", f"a script returned {value!r}"
        error = value[b"err"]
        if error is not None:
            raise ResponseError(error.decode())
        if value[b"ok"] is not None:
            return value[b"ok"]
        return [self._from_lua(value[place]) for place in range(1, len(value) + 1)]
