"""Who may look: nobody but this machine, who has the password, or whom another service vouches for.

::

    loopback            no question asked
    --auth basic        one name and password, from a file or WORKBENCH_PASSWORD; never on the command line
    --auth github …     Panel's OAuth; key and secret from PANEL_OAUTH_*; and only --allow-user NAME, or '*'

Who gives several wrong passwords in a row waits, longer each time, whatever is given meanwhile.

Panel's own login page (1.9.4) asks a CDN for its logo, and takes a password that happens to be a file's name for that
file; so the page and the check are ours. The login lasts as long as the server: its key is made at each start.
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

from workbench.errors import UsageError

__all__ = ["PASSWORD", "Access", "Lockout", "options_of", "read_password"]

PASSWORD = "WORKBENCH_PASSWORD"  #: environment variable that may hold the password
SHORTEST = 8  #: characters of a password
WAIT = 1.0  #: seconds that a wrong password waits for its answer
WRONG = "Name or password is wrong."

TRIES = 5  #: wrong passwords of one client in a row, after which it is locked out
CROWD = 50  #: the same of all clients together that one proxy speaks for
LOCKED = 60.0  #: seconds of the first lock-out; each further wrong password doubles them
LONGEST = 3600.0  #: seconds of the longest lock-out; a client that was silent as long after one starts anew
CLIENTS = 4096  #: clients that are remembered; the one that was silent longest is forgotten first


@dataclass(frozen=True)
class Access:
    """How people sign in.

    Attributes:
        auth: ``basic``, or the name of one of Panel's OAuth providers.
        user, password: for ``basic``.
        users: with OAuth, the names that may look; ``*`` for all whom the provider knows.
    """

    auth: str
    user: str = "workbench"
    password: str = ""
    users: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, auth: str, user: str = "workbench", password_file: str | None = None, users: Sequence[str] = ()
    ) -> Access:
        """What was asked for on the command line.

        Raises:
            UsageError: no or a short password, an unknown provider, no users named for one, or no key.
        """
        if auth == "basic":
            if users:
                raise UsageError("--allow-user is about OAuth; --auth basic has one name, given with --user")
            return cls(auth, user, read_password(password_file))
        if password_file is not None:
            raise UsageError(f"--password-file is about --auth basic, not {auth!r}")
        from panel.auth import AUTH_PROVIDERS

        if auth not in AUTH_PROVIDERS or auth in ("password", "pam"):
            known = ", ".join(sorted(set(AUTH_PROVIDERS) - {"password", "pam"}))
            raise UsageError(f"--auth {auth!r} is none of basic, {known}")
        if not users:
            raise UsageError(
                f"anyone with an account at {auth!r} could sign in; name who may with --allow-user NAME, or '*' where "
                "the provider lets in nobody else"
            )
        for name in ("PANEL_OAUTH_KEY", "PANEL_OAUTH_SECRET"):
            if not os.environ.get(name):
                raise UsageError(f"--auth {auth} needs the environment variable {name}; see docs/serving.md")
        return cls(auth, users=tuple(users))

    def lets_in(self, user: str | None) -> bool:
        """Whether who signed in may look."""
        allowed = (self.user,) if self.auth == "basic" else self.users
        return bool(user) and ("*" in allowed or user in allowed)


def read_password(path: str | None) -> str:
    """The first line of a file that only its owner can read, or of :data:`PASSWORD`.

    Raises:
        UsageError: neither, a file that others can read, or a password that is too short or no UTF-8.
    """
    if path is None:
        found = os.environ.get(PASSWORD, "")
        if not found:
            raise UsageError(f"--auth basic needs a password: --password-file FILE, or the variable {PASSWORD}")
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
    except UnicodeEncodeError:  # the system hands on any bytes, and no browser could send these
        raise UsageError(f"the password in {PASSWORD} is not UTF-8; choose another, or save it as UTF-8") from None
    if len(found) < SHORTEST:
        raise UsageError(f"the password has {len(found)} characters; take {SHORTEST} or more")
    return found


class Lockout:
    """Wrong passwords of each client, and how long it has to wait for them.

    Args:
        clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._clients: OrderedDict[str, tuple[int, float]] = OrderedDict()  # wrong in a row, locked until

    def __len__(self) -> int:
        return len(self._clients)

    def wait(self, client: str) -> float:
        """Seconds until a password of this client is looked at again; 0 when it is looked at now."""
        return max(0.0, self._clients.get(client, (0, 0.0))[1] - self._clock())

    def wrong(self, client: str, tries: int = TRIES) -> None:
        """Count a wrong password; with the ``tries``-th in a row the client is locked out."""
        now = self._clock()
        count, until = self._clients.pop(client, (0, now))
        count = 1 if now - until > LONGEST else count + 1
        locked = LOCKED * 2.0 ** min(count - tries, 16) if count >= tries else 0.0
        self._clients[client] = count, now + min(locked, LONGEST)
        while len(self._clients) > CLIENTS:
            self._clients.popitem(last=False)

    def right(self, client: str) -> None:
        """Forget the wrong passwords of a client that gave the right one."""
        self._clients.pop(client, None)


def is_local(url: str) -> bool:
    """Whether a browser that is sent there stays on this server.

    Paths of this server have none of the characters that browsers drop or take for a slash: tabs, backslashes.
    """
    return re.fullmatch(r"/(?!/)[A-Za-z0-9._~/-]*(\?[^\x00-\x20\x7f]*)?", url) is not None


def in_words(seconds: float) -> str:
    """``1 minute``, ``45 seconds``: rounded up, so that the wait is over then."""
    whole = math.ceil(seconds)
    number, unit = (whole, "second") if whole <= 90 else (math.ceil(whole / 60), "minute")
    return f"{number} {unit}{'' if number == 1 else 's'}"


def options_of(access: Access) -> dict[str, Any]:
    """What :func:`panel.serve` is told; cookies are signed with a key of this start."""
    login = str(files("workbench.app") / "templates" / "login.html")
    refused = str(files("workbench.app") / "templates" / "refused.html")
    secret = os.environ.get("PANEL_COOKIE_SECRET") or secrets.token_urlsafe(32)
    # Signed sessions: a websocket opens only for a page that this server handed out after the login.
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
            # Any other words would be a stranger's, who made the link.
            self._show(WRONG if self.get_argument("error", "") else "")

        async def post(self) -> None:
            wanted = self._wanted()
            client, proxy = _client(self.request)
            wait = max(lockout.wait(client), lockout.wait(proxy) if proxy else 0.0)
            if wait:
                self._refuse(wait)
                return
            name, word = self.get_argument("username", ""), self.get_argument("password", "", strip=False)
            right = [hmac.compare_digest(a.encode("utf-8", "surrogatepass"), b.encode()) for a, b in
                     ((name, access.user), (word, access.password))]  # fmt: skip
            if all(right):
                lockout.right(client)
                lockout.right(proxy)
                self.set_current_user(access.user)
                self.redirect(wanted)
                return
            lockout.wrong(client)  # before the pause: attempts side by side are counted, too
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
            """The page that was asked for before the login; by default the first one, under the prefix.

            Raises:
                HTTPError: 400, it is on another host.
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
    """A sign-in of Panel's that leads nowhere but to pages of this server.

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
    """Who asks, and the proxy that speaks for them, or ``""``.

    A proxy on this machine adds the address that it saw at the end of ``X-Forwarded-For``. Others on this machine can
    write any address there, so that what comes through loopback is counted together, too.
    """
    peer = str(request.remote_ip)
    forwarded = request.headers.get("X-Forwarded-For", "").rpartition(",")[2].strip()[:64]
    try:
        through_proxy = bool(forwarded) and ipaddress.ip_address(peer).is_loopback
    except ValueError:
        through_proxy = False
    return (f"{peer} for {forwarded}", peer) if through_proxy else (peer, "")
