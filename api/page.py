"""The live page, and the page that documents the api: documents at the addresses of their views, and files beside them.

- All files are read once, as the application is made: a browser asks for thirty of them to open one view.
- A document names all of its modules in its head. A browser that learns of each by the one before asks in six rounds.
"""

from __future__ import annotations

from email.utils import formatdate
from hashlib import sha256
from mimetypes import guess_type
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.types import Scope

STATIC = Path(__file__).resolve().parent / "static"
VIEWS = ("/", "/runs/{names:path}", "/workers", "/serving", "/dead", "/events")  # open in access/auth.py, too
DOCS_MODULE, VENDOR = "docs.js", "vendor/"  # no modules of the live page


class PageFiles(StaticFiles):
    """The files in static/, from memory; whatever else is asked for is answered as StaticFiles does."""

    def __init__(self) -> None:
        super().__init__(directory=STATIC)
        paths = [path for path in sorted(STATIC.rglob("*")) if path.is_file()]
        self.bodies = {path.relative_to(STATIC).as_posix(): path.read_bytes() for path in paths}
        self._headers = {
            name: {
                "etag": f'"{sha256(body).hexdigest()[:32]}"',
                "last-modified": formatdate((STATIC / name).stat().st_mtime, usegmt=True),
            }
            for name, body in self.bodies.items()
        }

    async def get_response(self, path: str, scope: Scope) -> Response:
        """Answer a file; 304 to a browser that has it as it is."""
        if path not in self.bodies or scope["method"] not in ("GET", "HEAD"):
            return await super().get_response(path, scope)
        headers = self._headers[path]
        if headers["etag"] in Request(scope).headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self.bodies[path], media_type=guess_type(path)[0], headers=headers)

    @property
    def modules(self) -> list[str]:
        """The modules of the live page."""
        return [name for name in self.bodies if name.endswith(".js") and name != DOCS_MODULE and VENDOR not in name]


def page_router(files: PageFiles) -> APIRouter:
    """Make the routes of the live page, at the address of each of its views, and of the page that documents the api."""
    routes = APIRouter(include_in_schema=False)
    links = [f'<link rel="modulepreload" href="{{up}}static/{name}">' for name in files.modules]
    page = files.bodies["index.html"].decode().replace("{modules}", "\n  ".join(links))

    async def view(request: Request) -> HTMLResponse:
        """Answer the page; what it loads is as many levels up as its address is deep, whatever prefix a proxy adds."""
        path = request.scope.get("raw_path") or request.url.path.encode()  # raw: a name may hold a slash
        return HTMLResponse(page.replace("{up}", "../" * (path.count(b"/") - 1)))

    for address in VIEWS:
        routes.add_api_route(address, view)

    @routes.get("/docs")
    async def docs() -> HTMLResponse:
        return HTMLResponse(files.bodies["docs.html"])

    return routes
