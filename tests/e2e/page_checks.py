"""What a person sees at a glance and a test does not: overflow, contrast, names of controls; pictures to look at."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

from tests.e2e.chromium import Page

HEIGHT_MAX = 3000
SETTLED_S = 0.4

OVERFLOWING = """
[...document.querySelectorAll('header *, #view *, .toast, dialog[open] *')].filter((element) => {
  const box = element.getBoundingClientRect();
  const isScrolled = element.closest('.sr, thead, #nav, .uplot, .reward-parts, pre, .events li, svg');
  return box.width && !isScrolled && (box.right > innerWidth + 1 || box.left < -1);
}).slice(0, 5).map((element) => `${element.outerHTML.slice(0, 120)} ends at ${element.getBoundingClientRect().right}`)
"""

FAINT = """
(() => {
  const parse = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = parse(getComputedStyle(at).backgroundColor);
      if (color.length === 3 || color[3] > 0.9) return color;
    }
    return [255, 255, 255];
  };
  const found = new Set();
  for (const element of document.querySelectorAll('body *')) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !element.checkVisibility() || element.closest('.uplot, noscript')) continue;
    const style = getComputedStyle(element);
    const [a, b] = [light(parse(style.color)), light(behind(element))].sort((x, y) => y - x);
    const size = parseFloat(style.fontSize);
    const isLarge = size >= 24 || (size >= 18.6 && style.fontWeight >= 600);
    const ratio = (a + 0.05) / (b + 0.05);
    const name = `${element.tagName}.${element.className} ${ratio.toFixed(2)} ${style.color}`;
    if (ratio < (isLarge ? 3 : 4.5)) found.add(name);
  }
  return [...found].slice(0, 8);
})()
"""

NAMELESS = """
[...document.querySelectorAll('button, a[href], input, select')].filter((element) => {
  const label = element.getAttribute('aria-label') || element.labels?.length;
  const name = label || element.textContent.trim() || element.title;
  return element.checkVisibility() && !name;
}).map((element) => element.outerHTML.slice(0, 120))
"""


async def look(page: Page, name: str, directory: Path, *, width: int, height: int) -> None:
    """Check what is drawn for what no reader should meet, and leave a picture of it, as long as the page is."""
    await asyncio.sleep(SETTLED_S)
    for what, expression in (("beyond the window", OVERFLOWING), ("too faint", FAINT), ("without a name", NAMELESS)):
        found: list[Any] = await page.evaluate(expression)
        assert found == [], f"{name}: {what}: {found}"
    assert await page.evaluate("document.documentElement.scrollWidth") <= width, name
    long = min(HEIGHT_MAX, max(height, await page.evaluate("document.documentElement.scrollHeight")))
    metrics = {"width": width, "deviceScaleFactor": 1, "mobile": False}
    await page.call("Emulation.setDeviceMetricsOverride", height=long, **metrics)
    await asyncio.sleep(SETTLED_S)
    picture = await page.call("Page.captureScreenshot", format="png")
    (directory / f"{name}.png").write_bytes(base64.b64decode(picture["data"]))
    await page.call("Emulation.setDeviceMetricsOverride", height=height, **metrics)
