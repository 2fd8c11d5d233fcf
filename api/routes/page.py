"""The live page, and the page that documents the api: files of this package, nothing from elsewhere."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles

from .context import Context

STATIC = Path(__file__).resolve().parent.parent / "static"


def router(_: Context) -> APIRouter:
    """/ and /docs."""
    routes = APIRouter(include_in_schema=False)

    @routes.get("/")
    async def index() -> FileResponse:
        return FileResponse(STATIC / "index.html", media_type="text/html; charset=utf-8")

    @routes.get("/docs")
    async def docs() -> FileResponse:
        return FileResponse(STATIC / "docs.html", media_type="text/html; charset=utf-8")

    return routes


def static_files() -> StaticFiles:
    """Serve the files that the pages load."""
    return StaticFiles(directory=STATIC)
