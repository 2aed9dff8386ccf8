"""What tests with a browser stand on: `page` refuses and records what is not loopback, `serving` tells why not."""

from __future__ import annotations

import logging
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.conftest import is_alive, killing
from tests.serving import serving
from workbench.errors import UsageError

pytestmark = pytest.mark.browser

OUTSIDE = "http://192.0.2.1/style.css"  # TEST-NET-1: belongs to nobody
HTML = f"""<!doctype html><link rel="icon" href="data:,"><link rel="stylesheet" href="{OUTSIDE}">
<h1>here</h1><script>
console.error("said aloud"); try {{ new WebSocket("ws://192.0.2.1/ws") }} catch (e) {{}}
setTimeout(() => {{ throw new Error("uncaught") }})
</script>"""


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = HTML.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


def test_page_serves_loopback_and_records_what_it_refuses(page):
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        page.goto(f"http://127.0.0.1:{server.server_port}/")
        page.wait_for_timeout(200)
        assert page.locator("h1").inner_text() == "here"
        assert OUTSIDE in page.external
        assert any(url.startswith("ws://192.0.2.1") for url in page.external)
        assert not any("127.0.0.1" in url for url in page.external)
        assert any("said aloud" in text for text in page.console_errors)
        assert any("uncaught" in text for text in page.console_errors)
    finally:
        server.shutdown()
        server.server_close()


def test_a_quiet_page_records_nothing(page):
    page.goto("data:text/html,<h1>quiet</h1>")
    assert page.locator("h1").inner_text() == "quiet"
    assert page.external == []
    assert page.console_errors == []


def test_a_browser_that_hangs_is_killed_and_the_next_test_has_another(browser, page):
    from playwright.sync_api import Error

    with pytest.raises(Error, match="has been closed"), killing("chrom", after=1):
        page.evaluate("new Promise(() => {})")
    assert not is_alive(browser)


def test_the_browser_after_one_that_was_killed(page):
    assert page.evaluate("1 + 1") == 2


def test_a_server_that_does_not_start_says_why_and_one_that_does_ends(tmp_path):
    with pytest.raises(UsageError, match="is not a path of letters"), serving(tmp_path, prefix="?"):
        pytest.fail("it started")
    with serving(tmp_path, prefix="wb") as url:
        assert url.endswith("/wb/")
        with urllib.request.urlopen(f"{url}liveness", timeout=20) as reply:
            assert reply.status == 200
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{url}liveness", timeout=20)


def test_a_logger_may_be_created_while_pytest_goes_through_all_of_them():
    for at, _ in enumerate(logging.root.manager.loggerDict.values()):
        logging.getLogger(f"{__name__}.{at}" if at < 3 else __name__)
