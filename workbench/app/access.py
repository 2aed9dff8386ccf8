"""Access control: only this machine, users with the password, or users authenticated by another service.

::

    loopback            no sign-in
    --auth basic        one name and password, from a file or WORKBENCH_PASSWORD; never on the command line
    --auth github …     Panel's OAuth; key and secret from PANEL_OAUTH_*; and only --allow-user NAME, or '*'

After several wrong passwords in a row, a client must wait, longer each time; attempts in the meantime are ignored.

Panel's own login page (1.9.4) loads its logo from a CDN, and if the password is the name of a file it reads that file,
so the page and the check are our own. A login lasts as long as the server, which creates a new key at each start.
"""

from __future__ import annotations

import hmac
import ipaddress
import math
import os
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from workbench.core.words import plural
from workbench.errors import UsageError

PASSWORD = "WORKBENCH_PASSWORD"  #: environment variable that can contain the password
SHORTEST = 8  #: minimum length of a password
WAIT = 1.0  #: seconds until the answer to a wrong password
WRONG = "Wrong name or password."

TRIES = 5  #: wrong passwords of one client in a row, after which it is locked out
CROWD = 50  #: the same for all clients of one proxy together
LOCKED = 60.0  #: seconds of the first lock-out; each further wrong password doubles it
LONGEST = 3600.0  #: seconds of the longest lock-out; a client that stays silent this long afterwards starts afresh
CLIENTS = 4096  #: clients that are remembered; the least recently active is forgotten first


@dataclass(frozen=True)
class Access:
    """How users sign in.

    Attributes:
        auth: ``basic``, or the name of one of Panel's OAuth providers.
        user, password: for ``basic``.
        users: with OAuth, the users who have access; ``*`` for every user of the provider.
    """

    auth: str
    user: str = "workbench"
    password: str = ""
    users: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, auth: str, user: str = "workbench", password_file: str | None = None, users: Sequence[str] = ()
    ) -> Access:
        """Build from the command-line options.

        Raises:
            UsageError: missing or short password, unknown provider, no users named for it, or no key.
        """
        if auth == "basic":
            if users:
                raise UsageError("--allow-user is for OAuth; --auth basic has one user, given by --user")
            return cls(auth, user, read_password(password_file))
        if password_file is not None:
            raise UsageError(f"--password-file is for --auth basic, not {auth!r}")
        from panel.auth import AUTH_PROVIDERS

        if auth not in AUTH_PROVIDERS or auth in ("password", "pam"):
            known = ", ".join(sorted(set(AUTH_PROVIDERS) - {"password", "pam"}))
            raise UsageError(f"--auth {auth!r} is unknown; choose one of basic, {known}")
        if not users:
            raise UsageError(
                f"anyone with an account at {auth!r} could sign in; name the users with --allow-user NAME, or use "
                "'*' if the provider itself restricts sign-in"
            )
        for name in ("PANEL_OAUTH_KEY", "PANEL_OAUTH_SECRET"):
            if not os.environ.get(name):
                raise UsageError(f"--auth {auth} needs the environment variable {name}; see docs/serving.md")
        return cls(auth, users=tuple(users))

    def lets_in(self, user: str | None) -> bool:
        """Return whether the signed-in user has access."""
        allowed = (self.user,) if self.auth == "basic" else self.users
        return bool(user) and ("*" in allowed or user in allowed)


def read_password(path: str | None) -> str:
    """Return the first line of a file that only its owner can read, or the value of :data:`PASSWORD`.

    Raises:
        UsageError: neither is given, others can read the file, or the password is too short or not UTF-8.
    """
    if path is None:
        found = os.environ.get(PASSWORD, "")
        if not found:
            raise UsageError(f"--auth basic needs a password: use --password-file FILE, or set {PASSWORD}")
    else:
        try:
            with open(path, encoding="utf-8") as handle:
                if os.fstat(handle.fileno()).st_mode & 0o077:
                    raise UsageError(f"password file {path!r} can be read by others; chmod 600 it first")
                found = handle.readline().rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"password file {path!r} cannot be read: {error}") from None
    try:
        found.encode()
    except UnicodeEncodeError:  # the system passes on any bytes, but no browser could send these
        raise UsageError(f"the password in {PASSWORD} is not UTF-8; choose another, or save it as UTF-8") from None
    if len(found) < SHORTEST:
        raise UsageError(f"the password has {plural(len(found), 'character')}; use {SHORTEST} or more")
    return found


class Lockout:
    """Wrong passwords of each client, and how long it must wait.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._clients: OrderedDict[str, tuple[int, float]] = OrderedDict()  # wrong in a row, locked until

    def __len__(self) -> int:
        return len(self._clients)

    def wait(self, client: str) -> float:
        """Return the seconds until this client may try again; 0 if it may try now."""
        return max(0.0, self._clients.get(client, (0, 0.0))[1] - self._clock())

    def wrong(self, client: str, tries: int = TRIES) -> None:
        """Count a wrong password; the ``tries``-th in a row locks the client out."""
        now = self._clock()
        count, until = self._clients.pop(client, (0, now))
        count = 1 if now - until > LONGEST else count + 1
        locked = LOCKED * 2.0 ** min(count - tries, 16) if count >= tries else 0.0
        self._clients[client] = count, now + min(locked, LONGEST)
        while len(self._clients) > CLIENTS:
            self._clients.popitem(last=False)

    def right(self, client: str) -> None:
        """Forget the wrong passwords of a client after a right one."""
        self._clients.pop(client, None)


def is_local(url: str) -> bool:
    """Return whether a redirect to this path stays on this server.

    Paths of this server contain none of the characters that browsers drop or treat as a slash: tabs, backslashes.
    """
    return re.fullmatch(r"/(?!/)[A-Za-z0-9._~/-]*(\?[^\x00-\x20\x7f]*)?", url) is not None


def in_words(seconds: float) -> str:
    """Return ``1 minute`` or ``45 seconds``, rounded up: the wait is over by then."""
    whole = math.ceil(seconds)
    number, unit = (whole, "second") if whole <= 90 else (math.ceil(whole / 60), "minute")
    return f"{number} {unit}{'' if number == 1 else 's'}"


def options_of(access: Access) -> dict[str, Any]:
    """Return the options for :func:`panel.serve`; cookies are signed with a key created at this start."""
    login = str(files("workbench.app") / "templates" / "login.html")
    refused = str(files("workbench.app") / "templates" / "refused.html")
    secret = os.environ.get("PANEL_COOKIE_SECRET") or secrets.token_urlsafe(32)
    # Signed sessions: a websocket opens only for a page that this server served after the login.
    shared = {"cookie_secret": secret, "sign_sessions": True, "secret_key": secrets.token_urlsafe(32).encode()}
    import panel as pn

    pn.config.cookie_secret = secret
    if access.auth != "basic":
        pn.config.oauth_provider = access.auth
    make = _basic if access.auth == "basic" else _oauth
    return {**shared, "auth_provider": make(access, login, refused)}


def _basic(access: Access, login: str, refused: str) -> Any:
    import asyncio

    from panel.auth import BasicAuthProvider, BasicLoginHandler
    from tornado.escape import url_escape
    from tornado.web import HTTPError

    lockout = Lockout()

    class Login(_staying(BasicLoginHandler)):  # type: ignore[misc]
        def get(self) -> None:
            self.set_cookie("next_url", self.get_argument("next", "") or "/")
            # The text in the link is never shown: anyone can write a link.
            self._show(WRONG if self.get_argument("error", "") else "")

        async def post(self) -> None:
            wanted = self._wanted()
            client, proxy = _client(self.request)
            wait = max(lockout.wait(client), lockout.wait(proxy) if proxy else 0.0)
            if wait:
                self._refuse(wait)
                return
            name, word = self.get_argument("username", ""), self.get_argument("password", "", strip=False)
            right = [
                hmac.compare_digest(a.encode("utf-8", "surrogatepass"), b.encode())
                for a, b in ((name, access.user), (word, access.password))
            ]
            if all(right):
                lockout.right(client)
                lockout.right(proxy)
                self.set_current_user(access.user)
                self.redirect(wanted)
                return
            lockout.wrong(client)  # before the pause: concurrent attempts are counted, too
            if proxy:
                lockout.wrong(proxy, CROWD)
            await asyncio.sleep(WAIT)
            self.redirect(f"{self.request.path}?error={url_escape(WRONG)}&next={url_escape(wanted)}")

        def _refuse(self, wait: float) -> None:
            self.set_status(429)
            self.set_header("Retry-After", str(math.ceil(wait)))
            self._show(f"Too many wrong passwords. Try again in {in_words(wait)}.")

        def _show(self, error: str) -> None:
            self.set_header("Cache-Control", "no-store")
            self.write(self._login_template.render(login_endpoint=self._login_endpoint, errormessage=error))

        def _wanted(self) -> str:
            """Return the page requested before the login; by default the first one, under the prefix.

            Raises:
                HTTPError: 400, if it is on another host.
            """
            asked: str | None = self.get_cookie("next_url")
            if asked and not is_local(asked):
                raise HTTPError(400, "next_url leads to another host")
            root: str = self.request.path.removesuffix(self._login_endpoint) + "/"
            return root if asked in (None, "", "/") else str(asked)

    class Provider(BasicAuthProvider):
        @property
        def login_handler(self) -> type[Login]:
            Login._login_endpoint, Login._login_template = self._login_endpoint, self._login_template
            return Login

    return Provider(login_template=login, logout_template=refused, error_template=refused)


def _oauth(access: Access, login: str, refused: str) -> Any:
    from panel.auth import OAuthProvider

    class Provider(OAuthProvider):
        @property
        def login_handler(self) -> Any:
            return _staying(super().login_handler)

    return Provider(login_template=login, logout_template=refused, error_template=refused)


def _staying(handler: Any) -> Any:
    """Restrict a sign-in handler of Panel to redirects within this server.

    Panel (1.9.4, ``auth.py``, ``_validate_next_url``) lets ``///host`` and tabs pass; browsers read both as ``//host``.
    """
    from tornado.web import HTTPError

    class Staying(handler):
        def prepare(self) -> Any:
            asked = self.get_argument("next", "", strip=False)
            if asked and not is_local(asked):
                raise HTTPError(400, "next leads to another host")
            return super().prepare()

    return Staying


def _client(request: Any) -> tuple[str, str]:
    """Return the client and the proxy that forwards its requests, or ``""``.

    A proxy on this machine appends the address that it saw to ``X-Forwarded-For``. Other programs on this machine can
    write any address there, so requests through loopback are also counted together.
    """
    peer = str(request.remote_ip)
    forwarded = request.headers.get("X-Forwarded-For", "").rpartition(",")[2].strip()[:64]
    try:
        through_proxy = bool(forwarded) and ipaddress.ip_address(peer).is_loopback
    except ValueError:
        through_proxy = False
    return (f"{peer} for {forwarded}", peer) if through_proxy else (peer, "")
