"""axe finds nothing that breaks WCAG 2, levels A and AA, in any view of the live page: light and dark, wide and narrow.

axe/axe.min.js.gz is the file of that name in axe-core 4.14.1, as npm has it, compressed: few want to read or search it.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from rollfab.api.access.keys import new_key
from tests.e2e.chromium import Browser, Page
from tests.e2e.test_views import VIEWS, furnish, show
from tests.support.processes.api_server import ApiWorld, running_api

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

AXE = Path(__file__).parent / "axe" / "axe.min.js.gz"
SIZES = ((1440, 900), (390, 844))
OPENED = "document.querySelectorAll('details').forEach((each) => { each.open = true; })"
RULES = json.dumps(["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"])
FOUND = f"""
axe.run(document, {{ runOnly: {RULES} }}).then(({{ passes, violations }}) => ({{
  passed: passes.map(({{ id }}) => id),
  broken: violations.flatMap(({{ id, nodes }}) => nodes.map((node) => [id, node.html, node.failureSummary].join(' '))),
}}))
"""


async def broken(page: Page, axe: str) -> list[str]:
    """Rules that the page breaks as it is now, all of its details open, each with the element."""
    await page.evaluate(OPENED)
    await page.evaluate(axe)
    found = await page.evaluate(FOUND)
    assert {"color-contrast", "button-name"} <= set(found["passed"]), "axe has not seen the page"
    rows: list[str] = found["broken"]
    return rows


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.long)])
async def test_axe_finds_nothing_in_any_view(api: ApiWorld, browser: Browser, scheme: str) -> None:
    await furnish(api)
    axe = gzip.decompress(AXE.read_bytes()).decode()
    found: dict[str, list[str]] = {}
    for width, height in SIZES:
        page = await browser.open(api.url, width=width, height=height, scheme=scheme)
        for name in VIEWS:
            await show(page, api, name)
            found[f"{name}, {width} wide"] = await broken(page, axe)
            await api.beat("controller-1", "controller")
    assert {name: rows for name, rows in found.items() if rows} == {}
    assert page.complaints() == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_axe_finds_nothing_in_a_second_look_and_where_a_key_is_asked_for(
    api: ApiWorld, broker_url: str, browser: Browser, scheme: str
) -> None:
    await furnish(api)
    axe = gzip.decompress(AXE.read_bytes()).decode()
    page = await browser.open(f"{api.url}dead", scheme=scheme)
    await page.click("[data-f=retry_cause]")
    await page.wait_text("#ask", "will run again")
    assert await broken(page, axe) == []
    async with running_api(broker_url, control_keys=(new_key(),)) as locked:
        page = await browser.open(locked.url, scheme=scheme)
        await page.wait_text("#key-dialog", "Key needed")
        assert await broken(page, axe) == []


async def test_axe_is_heard_where_a_rule_is_broken(api: ApiWorld, browser: Browser) -> None:
    page = await browser.open(api.url)
    await page.wait_text("#state", "live", timeout_s=10)
    await page.evaluate("document.body.append(document.createElement('button'))")
    (row,) = await broken(page, gzip.decompress(AXE.read_bytes()).decode())
    assert row.startswith("button-name ")
