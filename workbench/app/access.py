"""Who may look: nobody but this machine, who has the password, or whom another service vouches for.

::

    loopback            no question asked
    --auth basic        one name and password, from a file or WORKBENCH_PASSWORD; never on the command line
    --auth github …     Panel's OAuth; key and secret from PANEL_OAUTH_*; and only --allow-user NAME, or '*'

Panel's own login page (1.9.4) asks a CDN for its logo, and takes a password that happens to be a file's name for that
file; so the page and the check are ours. The login lasts as long as the server: its key is made at each start.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from workbench.errors import UsageError

__all__ = ["PASSWORD", "Access", "options_of", "read_password"]

PASSWORD = "WORKBENCH_PASSWORD"  #: environment variable that may hold the password
SHORTEST = 8  #: characters of a password
WAIT = 1.0  #: seconds that a wrong password waits for its answer


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


def options_of(access: Access) -> dict[str, Any]:
    """What :func:`panel.serve` is told; cookies are signed with a key of this start."""
    login = str(files("workbench.app") / "templates" / "login.html")
    refused = str(files("workbench.app") / "templates" / "refused.html")
    secret = os.environ.get("PANEL_COOKIE_SECRET") or secrets.token_urlsafe(32)
    # Signed sessions: a websocket opens only for a page that this server handed out after the login.
    shared = {"cookie_secret": secret, "sign_sessions": True, "secret_key": secrets.token_urlsafe(32).encode()}
    if access.auth == "basic":
        import panel as pn

        pn.config.cookie_secret = secret
        return {**shared, "auth_provider": _basic(access, login, refused)}
    pages = {"login_template": login, "logout_template": refused, "oauth_error_template": refused}
    return {**shared, **pages, "oauth_provider": access.auth}


def _basic(access: Access, login: str, refused: str) -> Any:
    import asyncio

    from panel.auth import BasicAuthProvider, BasicLoginHandler, _validate_next_url
    from tornado.escape import url_escape
    from tornado.web import HTTPError

    class Login(BasicLoginHandler):
        async def post(self) -> None:
            wanted = self._wanted()
            name, word = self.get_argument("username", ""), self.get_argument("password", "", strip=False)
            right = [hmac.compare_digest(a.encode(), b.encode()) for a, b in
                     ((name, access.user), (word, access.password))]  # fmt: skip
            if all(right):
                self.set_current_user(access.user)
                self.redirect(wanted)
                return
            await asyncio.sleep(WAIT)
            words = url_escape("Name or password is wrong.")
            self.redirect(f"{self.request.path}?error={words}&next={url_escape(wanted)}")

        def _wanted(self) -> str:
            """The page that was asked for before the login; by default the first one, under the prefix.

            Raises:
                HTTPError: 400, it is on another host.
            """
            asked = _validate_next_url(self.get_cookie("next_url"))
            if asked and asked.startswith("//"):  # Panel lets "///host" pass, which a browser takes for "//host"
                raise HTTPError(400, "Invalid next url")
            root: str = self.request.path.removesuffix(self._login_endpoint) + "/"
            return root if asked in (None, "/") else asked

    class Provider(BasicAuthProvider):
        @property
        def login_handler(self) -> type[Login]:
            Login._login_endpoint, Login._login_template = self._login_endpoint, self._login_template
            return Login

    return Provider(login_template=login, logout_template=refused, error_template=refused)
