"""A real headless Chromium, driven over the pipe of its DevTools protocol: no driver, no package, no port.

`install_chromium.sh` beside this file installs one where there is none.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tests.support.until import until

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
MAC = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
FLAGS = (
    "--headless",
    "--no-sandbox",  # it only opens our own page, and containers often allow it no sandbox
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # a page that loads anything from elsewhere fails
    "--remote-debugging-pipe",
)
STEP_S = 0.05
MESSAGE_BYTES_MAX = 64 << 20  # a screenshot is one message


def find_chromium() -> str:
    """The browser's program."""
    for name in (*NAMES, MAC):
        if path := shutil.which(name):
            return path
    raise AssertionError("no Chromium on this machine: run tests/e2e/install_chromium.sh")


KEYS = {"Tab": (9, ""), "Enter": (13, "\r"), "Escape": (27, "")}  # code of Windows, text


class Browser:
    """One browser process and its protocol."""

    def __init__(self, reader: asyncio.StreamReader, write_fd: int) -> None:
        self._reader = reader
        self._write_fd = write_fd
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._next = 1
        self.events: list[dict[str, Any]] = []

    async def listen(self) -> None:
        """Sort answers to those who asked; keep events."""
        while True:
            message = json.loads((await self._reader.readuntil(b"\0"))[:-1])
            if "id" in message:
                self._answers.pop(message["id"]).set_result(message)
            else:
                self.events.append(message)

    async def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Run one command of the protocol."""
        number = self._next
        self._next += 1
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._write_fd, json.dumps(message).encode() + b"\0")
        result = await asyncio.wait_for(answer, 20)
        assert "error" not in result, f"{method}: {result['error']}"
        found: dict[str, Any] = result["result"]
        return found

    async def open(self, url: str, *, width: int = 1320, height: int = 1000, scheme: str = "light") -> Page:
        """A new tab that shows `url`."""
        target = (await self.call("Target.createTarget", url="about:blank"))["targetId"]
        session = (await self.call("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            await page.call(f"{domain}.enable")
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        await page.call("Emulation.setEmulatedMedia", features=media)
        await page.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        await page.call("Page.navigate", url=url)
        return page


class Page:
    """A tab."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        return await self._browser.call(method, self._session, **params)

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def text(self, selector: str) -> str | None:
        """What an element shows; None where there is none, or it is hidden."""
        query = f"(e => e && e.checkVisibility() ? e.innerText : null)(document.querySelector({json.dumps(selector)}))"
        shown: str | None = await self.evaluate(query)
        return shown

    async def wait_text(self, selector: str, expected: str, timeout_s: float = 6.0) -> None:
        """Wait until an element shows a text that contains `expected`."""
        shown: str | None = None

        async def is_shown() -> bool:
            nonlocal shown
            shown = await self.text(selector)
            return expected in (shown or "")

        await until(is_shown, lambda: f"{expected!r} in {selector}, which shows {shown!r}", timeout_s, STEP_S)

    async def wait_gone(self, selector: str, timeout_s: float = 30.0) -> None:
        """Wait until an element is hidden, or not there."""

        async def is_gone() -> bool:
            return await self.text(selector) is None

        await until(is_gone, f"{selector} is gone", timeout_s, STEP_S)

    async def wait_for(self, find: str, timeout_s: float = 6.0) -> None:
        """Wait until an element is there and visible."""
        seen = f"(e => !!e && e.checkVisibility())({find})"
        await until(lambda: self.evaluate(seen), f"{find} is there", timeout_s, STEP_S)

    async def wait_value(self, expression: str, expected: Any, timeout_s: float = 6.0) -> None:
        """Wait until a JavaScript expression has the value `expected`: what a page draws comes after what it writes."""
        found: Any = None

        async def has_it() -> bool:
            nonlocal found
            found = await self.evaluate(expression)
            return bool(found == expected)

        await until(has_it, lambda: f"{expression} is {expected!r}, but {found!r}", timeout_s, STEP_S)

    async def click(self, selector: str) -> None:
        """Click the middle of an element with a real mouse event, once it is there."""
        find = f"document.querySelector({json.dumps(selector)})"
        await self.wait_for(find)
        await self.evaluate(f"{find}.scrollIntoView({{block: 'center'}})")
        x, y = await self.evaluate(f"(r => [r.x + r.width / 2, r.y + r.height / 2])({find}.getBoundingClientRect())")
        for kind in ("mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def type(self, selector: str, text: str) -> None:
        """Type into an element, once it is there."""
        await self.wait_for(f"document.querySelector({json.dumps(selector)})")
        await self.evaluate(f"document.querySelector({json.dumps(selector)}).focus()")
        await self.call("Input.insertText", text=text)

    async def press(self, key: str) -> None:
        """Press a key of KEYS, on whatever has the focus."""
        code, text = KEYS[key]
        stroke = {"key": key, "code": key, "windowsVirtualKeyCode": code, **({"text": text} if text else {})}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **stroke)
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=code)

    async def tab_to(self, selector: str, count_max: int = 80) -> None:
        """Press Tab until an element has the focus; it must be shown where it is."""
        await self.wait_for(f"document.querySelector({json.dumps(selector)})")
        for _ in range(count_max):
            await self.press("Tab")
            if await self.evaluate(f"document.activeElement.matches({json.dumps(selector)})"):
                style = await self.evaluate("getComputedStyle(document.activeElement).outlineStyle")
                assert style != "none", f"nobody sees that {selector} has the focus"
                return
        raise AssertionError(f"{selector} is not reached by pressing Tab {count_max} times")

    def complaints(self) -> list[str]:
        """Errors that the page's console has shown: exceptions, blocked loads, violations of its policy."""
        found = []
        for event in self._own_events():
            params = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(json.dumps(params["exceptionDetails"]))
            if event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
                found.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        return found

    def requested(self) -> list[str]:
        """Every address that the page has asked for."""
        sent = [event for event in self._own_events() if event["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def _own_events(self) -> list[dict[str, Any]]:
        """The events of this tab: others of the browser go on beside it."""
        return [event for event in self._browser.events if event.get("sessionId") == self._session]


@contextlib.asynccontextmanager
async def open_browser(profile: Path) -> AsyncIterator[Browser]:
    """Start a browser; it ends with the block."""
    to_browser, from_browser = _pipe(), _pipe()
    program = 'exec "$@" 3<&"$IN" 4>&"$OUT"'  # the protocol's pipes are descriptors 3 and 4
    process = await asyncio.create_subprocess_exec(
        *("bash", "-c", program, "bash", find_chromium(), *FLAGS, f"--user-data-dir={profile}"),
        env={**os.environ, "IN": str(to_browser[0]), "OUT": str(from_browser[1]), "HOME": str(profile)},
        pass_fds=(to_browser[0], from_browser[1]),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    os.close(to_browser[0])
    os.close(from_browser[1])
    reader = asyncio.StreamReader(limit=MESSAGE_BYTES_MAX)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(from_browser[0], "rb", 0)
    )
    browser = Browser(reader, to_browser[1])
    listening = asyncio.create_task(browser.listen())
    try:
        yield browser
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        os.close(to_browser[1])  # the browser ends with its pipe
        transport.close()
        try:
            await asyncio.wait_for(process.wait(), 5)
        except TimeoutError:
            process.kill()
            await process.wait()


def _pipe() -> tuple[int, int]:
    """A pipe whose descriptors are above those that the browser wants."""
    ends = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return high[0], high[1]
