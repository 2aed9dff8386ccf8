"""Who may look, and how a server may be started: without a browser, and without starting one."""

from __future__ import annotations

import logging
import os
import socket
import warnings

import pytest

from workbench.app import access
from workbench.app.access import PASSWORD, Access, Lockout, in_words, read_password
from workbench.app.serve import serve, start
from workbench.cli import main
from workbench.errors import UsageError


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    for name in (PASSWORD, "PANEL_OAUTH_KEY", "PANEL_OAUTH_SECRET"):
        monkeypatch.delenv(name, raising=False)


def test_a_password_is_the_first_line_of_a_file_of_ones_own(tmp_path, monkeypatch):
    path = tmp_path / "word"
    path.write_text(" secret word \nmore\n")
    path.chmod(0o600)
    assert read_password(str(path)) == " secret word "
    for mode in (0o640, 0o604, 0o660):
        path.chmod(mode)
        with pytest.raises(UsageError, match="read by others"):
            read_password(str(path))
    monkeypatch.setenv(PASSWORD, "from the environment")
    assert read_password(None) == "from the environment"


def test_a_password_that_is_no_utf8_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(os.environb, PASSWORD.encode(), b"secret w\xf6rd")
    with pytest.raises(UsageError, match="UTF-8"):
        read_password(None)
    path = tmp_path / "word"
    path.write_bytes(b"secret w\xf6rd\n")
    path.chmod(0o600)
    with pytest.raises(UsageError, match=r"cannot be read.*utf-8"):
        read_password(str(path))


@pytest.mark.parametrize("text, words", [("", "0 characters"), ("short", "5 characters"), ("\nsecret word", "0 char")])
def test_a_short_password_is_refused(tmp_path, text, words):
    path = tmp_path / "word"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(UsageError, match=words):
        read_password(str(path))


@pytest.mark.parametrize(
    "options, words",
    [
        ({"auth": "basic"}, PASSWORD),
        ({"auth": "basic", "password_file": "/nonexistent"}, "cannot be read"),
        ({"auth": "github"}, "--allow-user"),
        ({"auth": "github", "users": ["ann"]}, "PANEL_OAUTH_KEY"),
        ({"auth": "nonsense", "users": ["ann"]}, "choose one of basic"),
        ({"auth": "password", "users": ["ann"]}, "choose one of basic"),
        ({"auth": "basic", "users": ["ann"]}, "--user"),
        ({"auth": "github", "password_file": "x"}, "for --auth basic"),
        ({"address": "0.0.0.0"}, "--insecure"),
        ({"address": "::1"}, "IPv6.*localhost"),
        ({"address": "::", "insecure": True}, "IPv6.*0.0.0.0"),
        ({"address": "fe80::1%eth0", "insecure": True}, "IPv6"),
        ({"prefix": "a b"}, "prefix"),
        ({"prefix": "../up"}, "prefix"),
        ({"prefix": "<b>"}, "prefix"),
        ({"origins": ["http://x/"]}, "origin"),
        ({"origins": ["*"]}, "any page"),
        ({"certificate": "x.pem"}, "--key"),
        ({"exports": "/"}, "inside ROOT"),
        ({"exports": "../"}, "inside ROOT"),
        ({"exports": "nowhere"}, "inside ROOT"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_listens(tmp_path, options, words):
    with pytest.raises(UsageError, match=words):
        start(tmp_path, 0, **options)


@pytest.mark.parametrize("address", ["0.0.0.0", "10.0.0.1", "example.org"])
def test_another_address_needs_a_question_or_leave(tmp_path, address):
    with pytest.raises(UsageError, match="--auth basic"):
        serve(tmp_path, address=address)
    with pytest.raises(UsageError, match=PASSWORD):  # asked for, but there is none
        serve(tmp_path, address=address, auth="basic")


def test_only_who_is_named_is_let_in(monkeypatch):
    monkeypatch.setenv("PANEL_OAUTH_KEY", "k")
    monkeypatch.setenv("PANEL_OAUTH_SECRET", "s")
    named, everyone = Access.of("github", users=["ann", "bob"]), Access.of("github", users=["*"])
    assert named.lets_in("ann") and named.lets_in("bob") and everyone.lets_in("eve")
    for nobody in ("eve", "", None, "*", "Ann"):
        assert not named.lets_in(nobody)
    assert not everyone.lets_in(None) and not everyone.lets_in("")


def test_the_command_line_says_what_does_not_fit(tmp_path, capsys):
    os.makedirs(tmp_path / "root")
    for words in (["--auth", "basic"], ["--allow-export", "../x"], ["--address", "0.0.0.0"], ["--prefix", "?"]):
        assert main(["serve", str(tmp_path / "root"), *words]) == 64
        assert capsys.readouterr().err.count("\n") == 1


def test_a_lock_out_grows_ends_and_is_forgotten():
    now = [0.0]
    lockout = Lockout(lambda: now[0])
    waits = []
    for _ in range(12):
        lockout.wrong("ann")
        waits.append(lockout.wait("ann"))
        assert lockout.wait("bob") == 0
        now[0] += waits[-1]
        assert lockout.wait("ann") == 0
    first, longest = access.LOCKED, access.LONGEST
    grown = [min(first * 2**n, longest) for n in range(12)]
    assert waits == [0.0] * (access.TRIES - 1) + grown[: 12 - access.TRIES + 1]
    now[0] += longest + 1
    lockout.wrong("ann")
    assert lockout.wait("ann") == 0
    for _ in range(access.TRIES - 2):
        lockout.wrong("ann")
    lockout.right("ann")
    lockout.wrong("ann")
    assert lockout.wait("ann") == 0


def test_no_number_of_clients_fills_the_memory_or_frees_one_that_goes_on():
    lockout = Lockout(lambda: 0.0)
    for n in range(3 * access.CLIENTS):
        lockout.wrong(f"client {n}")
        if n % 100 == 0:
            lockout.wrong("ann")
    assert len(lockout) == access.CLIENTS and lockout.wait("ann") == access.LONGEST


@pytest.mark.parametrize(
    "seconds, words", [(0.2, "1 second"), (59.5, "60 seconds"), (91, "2 minutes"), (3600, "60 minutes")]
)
def test_a_wait_is_said_in_words(seconds, words):
    assert in_words(seconds) == words


def test_ordinary_events_are_not_reported(monkeypatch):
    from bokeh.util.warnings import BokehUserWarning

    from workbench.app.serve import _not_about_closing, _quieten

    logger, handled = logging.getLogger("bokeh.server.views.ws"), []
    monkeypatch.setattr(logger, "level", logging.WARNING)  # a server that another test started may have set others'
    monkeypatch.setattr(logger, "callHandlers", lambda record: handled.append(record.getMessage()))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        _quieten()
        for words in ("reference already known 'p1'", "something else"):
            warnings.warn(words, BokehUserWarning, stacklevel=1)
            logger.warning("Failed sending message as connection was closed")
    logger.warning("another")
    logger.removeFilter(_not_about_closing)
    assert [str(one.message) for one in seen] == ["something else"] and handled == ["another"]


def test_a_port_in_use_is_not_wrong_usage(tmp_path, capsys):
    root = tmp_path / "root"
    root.mkdir()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", str(root), "--port", str(port)]) == 3
    err = capsys.readouterr().err
    assert f"cannot listen on port {port}" in err and "--port" in err and err.count("\n") == 1
    assert main(["serve", str(root), "--address", "no.such.host.invalid", "--insecure"]) == 64
