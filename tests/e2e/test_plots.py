"""Plots of little: one point, and values that are all equal, in a real browser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.chromium import Browser, Page
from tests.e2e.page_checks import look
from tests.e2e.test_views import finish
from tests.support.processes.api_server import ApiWorld

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

# Shows a plot alone, and tells its scales, its ticks, and whether the pixels at its first known value are the line's.
PLOTTED = """
(async ([title, xs, ys, line, options]) => {
  const { Plot } = await import(new URL('static/parts/plot.js', document.baseURI));
  const words = await import(new URL('static/parts/words.js', document.baseURI));
  const plot = new Plot(title, [{ name: 'it', show: words[line] }], options);
  document.getElementById('view').before(plot.element);
  plot.show([xs, ys]);
  await new Promise((done) => setTimeout(done, 300));
  const { scales, axes, ctx, valToPos } = plot.plot;
  const first = ys.findIndex((value) => value !== null);
  const x = valToPos(plot.data[0][first], 'x', true), y = valToPos(ys[first], 'y', true);
  const pixels = ctx.getImageData(x - 2, y - 2, 5, 5).data;
  const ink = [...pixels].filter((_, index) => index % 4 === 3 && pixels[index] > 200).length;
  const ends = (scale) => [scale.min, scale.max];
  return { x: ends(scales.x), y: ends(scales.y), ticks: axes[1]._values.map(String), dates: axes[0]._values, ink };
})(ASKED)
"""


async def plotted(page: Page, xs: list[int], ys: list[float | None], show: str, **options: Any) -> dict[str, Any]:
    """What a plot of these values shows."""
    found: dict[str, Any] = await page.evaluate(PLOTTED.replace("ASKED", json.dumps([str(ys), xs, ys, show, options])))
    return found


@pytest.mark.parametrize(
    ("ys", "show", "low"),
    [
        ([0.5], "figure", None),
        ([0.0], "figure", None),
        ([-3.0, -3.0, -3.0], "figure", None),
        ([4e6, 4e6, 4e6], "rate", None),
        ([7, 7, 7], "count", None),
        ([0, 0, 0], "count", 0),
        ([0.0], "rate", 0),
        ([None, 12.0, None], "rate", 0),
    ],
)
async def test_few_or_equal_values_are_seen_with_room_and_ticks_that_differ(
    api: ApiWorld, browser: Browser, ys: list[float | None], show: str, low: int | None
) -> None:
    page = await browser.open(api.url)
    await page.wait_text("#state", "live", timeout_s=10)
    found = await plotted(page, [3, 4, 5][: len(ys)], ys, show, isTime=False, low=low)

    # Then the value is inside the plot, above its lower end unless that is given, and drawn
    value = next(y for y in ys if y is not None)
    least, most = found["y"]
    assert least <= value < most and (least < value or value == low), found
    assert most - least >= abs(value) / 100
    assert found["x"][0] < found["x"][1]
    assert found["ink"] >= 4, found
    # And ticks are few, different, and none is below what cannot be
    assert 2 <= len(found["ticks"]) == len(set(found["ticks"])) <= 12, found
    assert low is None or least == low
    if show == "count":
        assert all(float(tick).is_integer() for tick in found["ticks"])
    assert page.complaints() == []


async def test_times_that_are_close_are_told_apart(api: ApiWorld, browser: Browser) -> None:
    page = await browser.open(api.url)
    await page.wait_text("#state", "live", timeout_s=10)
    found = await plotted(page, [1_000_000_000_000, 1_000_000_020_000], [1.0, 2.0], "rate", low=0)
    dates = [date for date in found["dates"] if date]
    assert len(dates) == len(set(dates)) >= 2, dates


async def test_a_run_of_one_version_shows_its_reward(api: ApiWorld, browser: Browser, pictures: Path) -> None:
    await finish(api, "g1", 4)
    page = await browser.open(f"{api.url}runs/r1", width=1440, height=900)
    await page.wait_text(".uplot", "mean", timeout_s=10)
    await look(page, "run-one-version", pictures, width=1440, height=900)
    label = await page.evaluate("document.querySelector('.uplot-host').getAttribute('aria-label')")
    assert label.startswith("Reward: mean, ± one deviation, least and most: 1 point, at last mean 1")
    assert page.complaints() == []
