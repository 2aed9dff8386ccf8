"""What the tests with a browser ask of a page: what its link says, where a figure is, a tap into it.

A page changes in several messages, and its link after what it shows: nothing here is read before it has come to rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

__all__ = ["at_rest", "box_of", "click_until", "frame", "link", "tap"]

REST = 250  #: ms between two looks that must be alike
STILL = 4  #: looks in a row at which a part of the page must be the same element
LOOKS = 120
FRAMES = """() => {
  const found = []
  const walk = (view) => {
    if (view.model.type === "Figure") {
      const {frame: {bbox}, model: {x_range: x, y_range: y}} = view
      found.push([bbox.left, bbox.top, bbox.width, bbox.height, x.start, x.end, y.start, y.end])
    } else for (const child of view.child_views ?? []) walk(child)
  }
  for (const root of Bokeh.index.roots) walk(root)
  return found
}"""


def link(page: Page, **wanted: str) -> dict[str, str]:
    """What the page's URL says, as soon as it says what is ``wanted``."""

    def said(url: str) -> dict[str, str]:
        return {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}

    page.wait_for_url(lambda url: wanted.items() <= said(url).items())
    return said(page.url)


def at_rest(page: Page, part: Locator) -> Locator:
    """That part of the page, once it has been the same element at the same place for a second.

    Tabulator builds its rows anew when the layout around it changes. A browser makes no click of a press on a row that
    is gone when the button is released.
    """
    before: Any = None
    same = 0
    for _ in range(LOOKS):
        now = part.element_handle()
        box = now.bounding_box() if now else None
        alike = before is not None and box == before[1] and now.evaluate("(one, two) => one === two", before[0])
        same = same + 1 if alike else 0
        if same == STILL:
            return part
        before = (now, box)
        page.wait_for_timeout(REST)
    raise TimeoutError(f"{part} was not at rest in {LOOKS * REST / 1000:.0f} s; last seen at {before}")


def box_of(page: Page, part: Locator) -> dict[str, float]:
    """Where that part of the page is, once it is at rest: what is drawn anew is nowhere for a moment."""
    for _ in range(LOOKS):
        if (box := at_rest(page, part).bounding_box()) is not None:
            return dict(box)
    raise TimeoutError(f"{part} has no place on the page")


def click_until(page: Page, part: Locator, there: Locator) -> None:
    """Click a part of the page until something is visible because of it.

    However long a row has been at rest, a page on a loaded machine may rebuild it between the press and the release.
    """
    for _ in range(4):
        at_rest(page, part).click()
        for _ in range(LOOKS // 3):
            if there.is_visible():
                return
            page.wait_for_timeout(REST)
    raise TimeoutError(f"{there} did not appear after four clicks on {part}")


def frame(page: Page) -> tuple[float, ...]:
    """Left, top, width, height of the first figure's frame on the page, and its ranges x0, x1, y0, y1, once at rest."""
    before: Any = None
    for _ in range(LOOKS):
        now = _frame(page)
        if now is not None and now == before:
            return now
        before = now
        page.wait_for_timeout(REST)
    raise TimeoutError(f"the figure did not come to rest in {LOOKS * REST / 1000:.0f} s; last seen: {before}")


def tap(page: Page, x: float, y: float) -> None:
    """Click at a place of the first figure, in its own coordinates; its vertical axis points down."""
    left, top, width, height, x0, x1, y0, y1 = frame(page)
    page.mouse.click(left + (x - x0) / (x1 - x0) * width, top + (y - y1) / (y0 - y1) * height)


def _frame(page: Page) -> tuple[float, ...] | None:
    figure = page.locator(".bk-Figure").first
    figure.scroll_into_view_if_needed()
    box = figure.bounding_box()
    shown = [one for one in page.evaluate(FRAMES) if one[2] > 0]  # those of hidden tabs have no width
    if box is None or not shown:
        return None
    left, top, *rest = shown[0]
    return (box["x"] + left, box["y"] + top, *rest)
