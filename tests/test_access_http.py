"""The login and the list of origins as a browser meets them: over HTTP, with its cookies, without a browser."""

from __future__ import annotations

from contextlib import closing
from http.client import HTTPConnection
from http.cookiejar import Cookie, CookieJar
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import HTTPCookieProcessor, OpenerDirector, build_opener

import pytest
from serving import serving

from workbench.app.access import PASSWORD

WORD = "right password"
LINK = "?ckpt=run%2Fstep-4&q=a%26b&tab=tensors"


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setenv(PASSWORD, WORD)
    monkeypatch.setattr("workbench.app.access.WAIT", 0)


@pytest.fixture(params=["", "wb", "a/b"], ids=["no prefix", "wb", "a/b"])
def base(request, tmp_path):
    with serving(tmp_path, auth="basic", prefix=request.param) as url:
        yield url


def browser() -> tuple[OpenerDirector, CookieJar]:
    jar = CookieJar()
    return build_opener(HTTPCookieProcessor(jar)), jar


def visit(client: OpenerDirector, url: str) -> str:
    """The address that it leads to."""
    with client.open(url) as answer:
        return str(answer.url)


def sign_in(client: OpenerDirector, base: str, word: str) -> tuple[int, str]:
    """Status and address of the page that the form of the login page leads to."""
    form = urlencode({"username": "workbench", "password": word}).encode()
    try:
        with client.open(base + "login", form) as answer:
            return answer.status, answer.url
    except HTTPError as error:  # it holds a socket, and its traceback would keep that
        error.close()
        return error.code, error.url


@pytest.mark.parametrize("wrong", [0, 2])
def test_a_link_is_still_known_after_a_wrong_password(base, wrong):
    client, _ = browser()
    assert "/login?next=" in visit(client, base + LINK)
    for _ in range(wrong):
        status, url = sign_in(client, base, "wrong password")
        assert status == 200 and url.startswith(base + "login?error=")
    assert sign_in(client, base, WORD) == (200, base + LINK)


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_login_without_a_link_ends_at_the_first_page(base, wrong):
    client, _ = browser()
    visit(client, base + "login")
    for _ in range(wrong):
        sign_in(client, base, "wrong password")
    assert sign_in(client, base, WORD) == (200, base)
    stranger, _ = browser()  # who was never shown the form
    assert sign_in(stranger, base, WORD) == (200, base)


@pytest.mark.parametrize("evil", ["//evil.example/", "https://evil.example/", "/\\evil.example", "///evil.example/"])
def test_no_login_leads_to_another_host(base, evil):
    for word in (WORD, "wrong password"):
        client, jar = browser()
        visit(client, base + "login")
        (cookie,) = [one for one in jar if one.name == "next_url"]
        assert isinstance(cookie, Cookie)
        cookie.value = evil
        assert sign_in(client, base, word) == (400, base + "login")


@pytest.mark.parametrize(
    "options, good",
    [
        ({"address": "0.0.0.0", "insecure": True}, "localhost:{port}"),
        ({"origins": ["wb.example.org"]}, "localhost:{port}"),
        ({"origins": ["wb.example.org"]}, "wb.example.org"),
        ({}, "localhost:{port}"),
    ],
)
def test_a_page_may_talk_to_a_server_on_whatever_port_was_free(tmp_path, options, good):
    with serving(tmp_path, **options) as url:
        port = int(url.rstrip("/").rpartition(":")[2])
        assert _talks(port, "http://" + good.format(port=port))
        assert not _talks(port, "http://evil.example")


def _talks(port: int, origin: str) -> bool:
    """Whether a page from there may open a websocket: the answer to its handshake."""
    asked = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13", "Origin": origin}
    with closing(HTTPConnection("127.0.0.1", port, timeout=20)) as line:
        line.request("GET", "/ws", headers={**asked, "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA=="})
        status = line.getresponse().status
    assert status in (101, 403)
    return status == 101
