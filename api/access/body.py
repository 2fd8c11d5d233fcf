"""No request's body may be larger than HTTP_BODY_BYTES_MAX, whatever its header says of its length."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...fabric.contract.limits import HTTP_BODY_BYTES_MAX
from .problems import problem

TEXT = f"a request's body may have {HTTP_BODY_BYTES_MAX:,} bytes: send less at once, or a reference to a file"


class BodyLimit:
    """ASGI middleware; stands behind the guard, so strangers are refused before a byte is read."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isdigit() and int(declared[:20]) > HTTP_BODY_BYTES_MAX:
            await problem(413, "PayloadTooLarge", TEXT)(scope, receive, send)
            return
        size = 0

        async def receive_some() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > HTTP_BODY_BYTES_MAX:
                raise HTTPException(413, TEXT)
            return message

        await self._app(scope, receive_some, send)
