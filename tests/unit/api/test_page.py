"""The page's files from memory, and the document that names them."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI

from rollfab.api.page import STATIC, PageFiles, page_router

IMPORT = re.compile(r'^(?:import|export) .*?"(\.[^"]+)";$', re.MULTILINE)


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    files = PageFiles()
    app = FastAPI()
    app.include_router(page_router(files))
    app.mount("/static", files)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://page") as found:
        yield found


async def test_the_document_names_every_module_that_its_modules_import(http: httpx.AsyncClient) -> None:
    document = (await http.get("/runs/r1/trajectories/g%2F1.0")).text
    named = re.findall(r'modulepreload" href="\.\./\.\./\.\./static/([^"]+)"', document)
    wanted, found = ["app.js"], set[str]()
    while wanted:
        name = wanted.pop()
        found.add(name)
        place = (STATIC / name).parent
        paths = [
            (place / path).resolve().relative_to(STATIC).as_posix()
            for path in IMPORT.findall((STATIC / name).read_text())
        ]
        wanted += [path for path in paths if path not in found]
    assert len(found) > 20
    assert sorted(named) == sorted(found)
    assert "{" not in document


async def test_a_file_is_answered_once_and_then_only_said_to_be_the_same(http: httpx.AsyncClient) -> None:
    answer = await http.get("/static/views/tokens.js")
    assert answer.content == (STATIC / "views" / "tokens.js").read_bytes()
    assert answer.headers["content-type"].startswith("text/javascript")
    again = await http.get("/static/views/tokens.js", headers={"if-none-match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    other = await http.get("/static/views/tokens.js", headers={"if-none-match": '"another"'})
    assert other.status_code == 200


@pytest.mark.parametrize("path", ["/static/nothing.js", "/static/", "/static/../app.py", "/static/%2e%2e/app.py"])
async def test_what_is_no_file_of_the_page_is_not_there(http: httpx.AsyncClient, path: str) -> None:
    assert (await http.get(path)).status_code == 404


async def test_files_are_only_read(http: httpx.AsyncClient) -> None:
    assert (await http.post("/static/app.js")).status_code == 405
    assert (await http.head("/static/app.js")).status_code == 200
