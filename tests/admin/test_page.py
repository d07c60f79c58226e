"""The page in a real browser: on any screen, by day and by night, it is whole and readable. Its pictures are in ``tmp_path``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.browser import Browser, browsing, serving
from support.statuses import failing, healthy, hour_before, lagging

from mldserver.status_document import Status

pytestmark = pytest.mark.services

SCREENS = (("light", 1280), ("dark", 1280), ("light", 390), ("dark", 390))
"""Of what colour, and how many pixels wide."""

UNREADABLE = """
const luminance = (colour) => colour.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255)
  .map((part) => part <= .04045 ? part / 12.92 : ((part + .055) / 1.055) ** 2.4)
  .reduce((sum, part, place) => sum + part * [.2126, .7152, .0722][place], 0);
const ground = (el) => {
  for (; el; el = el.parentElement) {
    const colour = getComputedStyle(el).backgroundColor;
    if (!/, 0\\)$/.test(colour)) return colour;
  }
};
const found = [];
for (const el of document.querySelectorAll("body *")) {
  const own = [...el.childNodes].filter((node) => node.nodeType === 3 && node.data.trim()).length;
  if (!own || !el.getClientRects().length || ["SCRIPT", "TITLE", "title"].includes(el.tagName)) continue;
  const ink = getComputedStyle(el)[el instanceof SVGElement ? "fill" : "color"];
  const [dark, light] = [luminance(ink), luminance(ground(el))].sort((a, b) => a - b);
  if ((light + .05) / (dark + .05) < 4.5) found.push(`${el.tagName} ${el.className} "${el.textContent}" ${ink}`);
}
return found;
"""
"""Texts whose contrast is below what WCAG asks of small ones (AA)."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as one:
        yield one


@pytest.mark.parametrize(
    ("make", "word"), [(healthy, "Healthy"), (lagging, "Needs a look"), (failing, "Not ready")]
)
def test_it_is_whole_and_readable_on_a_wide_screen_and_a_phone_by_day_and_night(
    browser: Browser, tmp_path: Path, make: Callable[[int], Status], word: str
) -> None:
    with serving(hour_before(make)) as stage:
        for theme, width in SCREENS:
            browser.open(stage.url, theme=theme, width=width)
            browser.until_health(word)
            browser.until("document.querySelectorAll('.chart .path').length >= 4")
            browser.shoot(tmp_path / f"{make.__name__}-{theme}-{width}.png")
            assert browser.run(UNREADABLE) == []
            # Nothing sticks out, nothing comes from elsewhere, and the policy that guards the page forbids nothing of it.
            assert browser.run("return document.documentElement.scrollWidth") == width
            loaded = browser.run("return performance.getEntriesByType('resource').map((each) => each.name)")
            assert {url.removeprefix(stage.url) for url in loaded} <= {
                "status",
                "history/departures",
                "events",
            }
            assert browser.complaints() == []
