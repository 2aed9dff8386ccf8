"""Pictures of every tab, taken by the browser of the tests from a server on ``sample_ckpts/``.

``python -m tests.screenshots`` writes the pages' own pictures, light at 1440 × 900, into ``docs/images``;
``python -m tests.screenshots FOLDER`` writes light and dark at both widths, for people to look at. Requests that leave
the machine are refused, and errors of the console are printed; either ends with exit code 1.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

from playwright.sync_api import sync_playwright

from tests.conftest import CHROMIUM_FLAGS, ROOT, find_chromium, is_loopback
from tests.tab_views import SIZES, THEMES, VIEWS, visit

PATIENCE = 30_000  #: ms


def main(arguments: list[str]) -> int:
    folder = Path(arguments[0]) if arguments else ROOT / "docs" / "images"
    cases = list(product(THEMES, SIZES)) if arguments else [("light", SIZES[0])]
    folder.mkdir(parents=True, exist_ok=True)
    chromium = find_chromium()
    if chromium is None:
        print("no Chromium; install it or set WORKBENCH_CHROMIUM", file=sys.stderr)
        return 2
    wrong: list[str] = []
    with served() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_FLAGS)
        for (theme, (width, height)), tab in product(cases, VIEWS):
            context = browser.new_context(color_scheme=theme, viewport={"width": width, "height": height})
            page = context.new_page()
            page.set_default_timeout(PATIENCE)
            page.on("console", lambda m: wrong.append(m.text) if m.type == "error" else None)
            context.route(lambda url: not is_loopback(url), lambda r: (wrong.append(r.request.url), r.abort()))
            name = f"{tab}-{theme}-{width}.png" if arguments else f"{tab}.png"
            visit(page, url, tab)
            page.screenshot(path=folder / name)
            print(folder / name)
            context.close()
        browser.close()
    for line in wrong:
        print(line, file=sys.stderr)
    return bool(wrong)


@contextmanager
def served() -> Iterator[str]:
    """URL of ``workbench serve sample_ckpts`` on a free port, as a user would start it."""
    command = [sys.executable, "-m", "workbench", "serve", "sample_ckpts", "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said = ""
        for line in process.stdout or ():
            said += line
            if found := re.search(r"http://127\.0\.0\.1:\d+/", line):
                yield found[0]
                return
        raise RuntimeError(f"the server did not start: {said}")
    finally:
        process.terminate()
        process.wait(20)
        if process.stdout:
            process.stdout.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
