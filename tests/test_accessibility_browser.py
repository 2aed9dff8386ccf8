"""Every tab, light and dark, at both widths: it fits, the console reports no error, axe-core finds nothing grave.

With ``WORKBENCH_SHOTS=FOLDER`` each is kept as a picture there; CI does.

axe.min.js comes with the package axe-playwright-python; nothing is fetched. It looks into open shadow roots, where
Panel draws. What it cannot decide (``incomplete``) is no finding.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.screenshots import served
from tests.tab_views import SETTLE, SIZES, THEMES, VIEWS, visit

pytestmark = pytest.mark.browser
GRAVE = ("serious", "critical")
SHOTS = os.environ.get("WORKBENCH_SHOTS")
BACKGROUND = "getComputedStyle(document.body).backgroundColor"
BEYOND = "document.scrollingElement.scrollWidth - window.innerWidth"  #: pixels that only sideways scrolling shows


@pytest.fixture(scope="module")
def url():
    with served() as url:
        yield url


@pytest.fixture(scope="module")
def script() -> str:
    """The text of axe.min.js."""
    from axe_playwright_python.base import AXE_FILE_PATH

    return AXE_FILE_PATH.read_text("utf-8")


def grave(page, script: str) -> list[str]:
    """``impact rule: what, at the elements`` of each finding."""
    page.evaluate(script)
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    return [
        f"{one['impact']} {one['id']}: {one['help']}, at {[str(node['target']) for node in one['nodes'][:4]]} "
        f"({len(one['nodes'])}): {one['nodes'][0]['failureSummary']}"
        for one in found
        if one["impact"] in GRAVE
    ]


def test_axe_sees_what_is_wrong(page, script):
    page.set_content(
        "<html lang=en><title>x</title><main><div id=host></div></main><script>"
        "host.attachShadow({mode:'open'}).innerHTML = '<button></button><p style=\"color:#bbb\">pale</p>'</script>"
    )
    rules = {finding.split()[1] for finding in grave(page, script)}
    assert rules == {"button-name:", "color-contrast:"}


#: A quick run sees these once, wide and light or narrow and dark; a slow one sees every page in every size and theme.
QUICK = ("home", "run", "doctor")
LOOKS = [
    pytest.param(
        tab,
        size,
        theme,
        marks=[] if tab in QUICK and SIZES.index(size) == THEMES.index(theme) == at % 2 else pytest.mark.slow,
        id=f"{tab}-{theme}-{size[0]}",
    )
    for at, tab in enumerate(VIEWS)
    for size in SIZES
    for theme in THEMES
]
PHONE = (400, 800)  #: for the two pages that people open first
LOOKS += [
    pytest.param(tab, PHONE, theme, marks=pytest.mark.slow, id=f"{tab}-{theme}-{PHONE[0]}")
    for tab in ("home", "run")
    for theme in THEMES
]


@pytest.mark.parametrize("tab, size, theme", LOOKS)
def test_a_tab_fits_and_has_no_grave_findings(page, url, script, tab, size, theme):
    look(page, url, tab, size, theme)
    assert page.evaluate(BEYOND) <= 0, f"{tab} is wider than {size[0]} pixels"
    if SHOTS:
        Path(SHOTS).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=Path(SHOTS) / f"{tab}-{theme}-{size[0]}.png")
    assert grave(page, script) == []
    assert page.external == [] and told(page) == []


@pytest.mark.slow
@pytest.mark.parametrize("tab", VIEWS)
def test_a_tab_whose_theme_changes_has_no_grave_findings(page, url, script, tab):
    look(page, url, tab, SIZES[-1], THEMES[0])
    for theme in THEMES[::-1]:
        turn(page, theme)
        assert page.evaluate(BEYOND) <= 0, f"{tab} is wider than {SIZES[-1][0]} pixels"
        assert grave(page, script) == [], theme
    assert page.external == [] and told(page) == []


def look(page, url: str, tab: str, size: tuple[int, int], theme: str) -> None:
    """Open a tab at this size, in this theme, and wait until it is complete."""
    page.set_default_timeout(60_000)
    page.set_viewport_size({"width": size[0], "height": size[1]})
    page.emulate_media(color_scheme=theme)
    visit(page, url, tab)


def turn(page, theme: str) -> None:
    """Make the page light or dark, and wait until it is."""
    page.emulate_media(color_scheme=theme)
    for _ in range(60):
        bright = sum(map(int, re.findall(r"\d+", page.evaluate(BACKGROUND))[:3]))
        if (bright < 150) == (theme == "dark"):
            page.wait_for_timeout(SETTLE)
            return
        page.wait_for_timeout(250)
    raise TimeoutError(f"the page did not turn {theme}; its background adds up to {bright}")


def told(page) -> list[str]:
    """Errors that say something. On a loaded machine about one load in a hundred ends with a promise of the browser's
    components rejected with no value (``undefined``: no message, no stack), which nobody can act on. The tests that use
    the tabs (``quiet``) let not even that pass."""
    return [one for one in page.console_errors if one != "undefined"]
