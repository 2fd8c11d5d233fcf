"""Tasks that run beside their owner: when does it learn that one has failed, and does any outlive it?"""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from rollfab.fabric.host.helpers import Helpers, serve_together


async def wait_for_ever() -> None:
    await asyncio.Event().wait()


async def fail() -> None:
    raise LookupError("helper")


async def owner(error: Exception | None = None) -> None:
    """One whose helper fails, and who does not look."""
    async with Helpers(fail()):
        await asyncio.sleep(0)
        if error is not None:
            raise error


async def test_the_error_of_a_helper_is_raised_when_its_owner_looks_and_the_others_end_with_it() -> None:
    before = asyncio.all_tasks()
    helpers = Helpers(wait_for_ever(), fail())
    helpers.check()  # it has not begun yet
    await asyncio.sleep(0)
    with pytest.raises(LookupError, match="helper"):
        helpers.check()
    await helpers.end()
    assert asyncio.all_tasks() == before


async def test_an_owner_that_never_looks_learns_of_it_at_the_end() -> None:
    with pytest.raises(LookupError, match="helper"):
        await owner()


async def test_the_owner_s_own_error_comes_first() -> None:
    with pytest.raises(ValueError, match="mine"):
        await owner(ValueError("mine"))


async def test_helpers_that_are_ended_are_no_failure() -> None:
    before = asyncio.all_tasks()
    async with Helpers(wait_for_ever(), wait_for_ever()) as helpers:
        await asyncio.sleep(0)
        helpers.check()
    assert asyncio.all_tasks() == before
    assert helpers.error is None


async def test_an_owner_that_only_watches_learns_of_a_failure_at_once_and_else_waits_for_the_stop() -> None:
    before, stop = asyncio.all_tasks(), asyncio.Event()
    async with asyncio.timeout(30):
        with pytest.raises(LookupError, match="helper"):
            async with Helpers(wait_for_ever(), fail()) as helpers:
                await helpers.watch(stop)
        async with Helpers(wait_for_ever()) as helpers:
            asyncio.get_running_loop().call_soon(stop.set)
            await helpers.watch(stop)
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize("error", [None, LookupError("first")])
async def test_what_is_served_together_stops_with_the_first_that_ends_and_is_waited_for(
    error: Exception | None,
) -> None:
    before, stop, said = asyncio.all_tasks(), asyncio.Event(), list[str]()

    async def first() -> None:
        await asyncio.sleep(0)
        if error is not None:
            raise error

    async def other() -> None:
        await stop.wait()
        await asyncio.sleep(0.01)  # it gives back what it holds
        said.append("given back")

    async with asyncio.timeout(30):
        with contextlib.nullcontext() if error is None else pytest.raises(LookupError, match="first"):
            await serve_together(stop, first(), other())
    assert said == ["given back"]
    assert asyncio.all_tasks() == before
