"""URLs of checkpoints: scheme, host and key, and which of their parts may be shown."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from workbench.errors import NotACheckpointError, UsageError

#: ``http:/host`` is a slip, and may hold a password as a URL does.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)|(https?|file):/.*", re.DOTALL | re.IGNORECASE)
_FILE = re.compile(r"file:(?://(?:localhost)?)?(/(?!/)[^?#]*)", re.DOTALL | re.IGNORECASE)
_HOST = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[^\s:\[\]@]*)(?::(\d{0,5}))?")
#: What follows ``?`` in the name of an object, if it looks like a signature or a token.
_SECRET = re.compile(r"\?(?=[^?]*(?:sig|token|secret|password|credential|key)[^?=]*=).*", re.DOTALL | re.IGNORECASE)
NAMES = ("s3", "gs", "hf", "memory", "file")  #: schemes in which ``?`` is a character of a name
#: Aliases of stores → the name used here.
ALIASES = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az", "azure": "az"}


class Location(NamedTuple):
    """Where an object or a folder of objects is.

    Attributes:
        scheme: ``s3``, ``https`` …
        host: the bucket, container or server; without user information.
        key: the path below it, unquoted, without slashes at its ends.
        query: what follows ``?`` in an ``http`` URL: often a signature, so it is never shown.
        user: user information of the host, never shown either.
    """

    scheme: str
    host: str
    key: str
    query: str = ""
    user: str = ""

    @property
    def shown(self) -> str:
        """The URL without anything secret."""
        key = quote(self.key, safe="/+,:=@~!$&'()*;-._") if self.web else _SECRET.sub("?(query)", self.key)
        return f"{self.scheme}://{self.host}" + (f"/{key}" if key else "")

    @property
    def public(self) -> Location:
        """The location without its secrets."""
        return self._replace(query="", user="")

    @property
    def web(self) -> bool:
        """Whether the key is quoted in the URL, and a query may follow it."""
        return self.scheme in ("http", "https")

    @property
    def name(self) -> str:
        """Last component of the path."""
        return self.key.rpartition("/")[2] or self.host

    def at(self, relative: str) -> Location:
        """Return the location of a path below this one; a signature is valid for one object only and is dropped."""
        return self._replace(key=f"{self.key}/{relative}" if self.key else relative, query="")

    def above(self) -> Location:
        """Return the location of the folder that holds this one."""
        return self._replace(key=self.key.rpartition("/")[0], query="")


def is_url(text: str) -> bool:
    """Return whether a path is a URL rather than a path on disk."""
    return _URL.match(text) is not None


def shown(path: str) -> str:
    """Return a path, or a URL without its user, password and signature, as it may be printed and stored."""
    return parse(path).shown if is_url(path) else path


def on_disk(path: str) -> str:
    """Return the path that a ``file:`` URL names; any other path or URL as it is."""
    match = _FILE.fullmatch(path)
    return path if match is None else unquote(match[1])


def local_only(path: str, what: str) -> str:
    """Return a path to write to.

    Raises:
        UsageError: it is a URL.
    """
    if is_url(path):
        raise UsageError(f"{what} is not written to a store yet: name a local path instead of {parse(path).shown!r}")
    return path


_kept: Mapping[str, Any] = {}
_given: ContextVar[Mapping[str, Any] | None] = ContextVar("storage_options", default=None)


@contextmanager
def with_options(options: Mapping[str, Any] | None, *paths: Any) -> Iterator[None]:
    """Open every URL with these storage options meanwhile, unless a call gives others; paths on disk ignore them.

    Args:
        paths: the caller's arguments: paths, URLs, lists of them, or anything else, such as open checkpoints.

    Raises:
        UsageError: there are options, and none of the paths is a URL.
    """
    if options is None:
        yield
        return
    texts = [os.fsdecode(path) for path in _flat(paths) if isinstance(path, str | bytes | os.PathLike)]
    if not any(map(is_url, texts)):
        what = f"{texts[0]!r} is a path" if texts else "an open checkpoint has its own"
        raise UsageError(f"storage_options are for URLs, and {what}")
    token = _given.set(options)
    try:
        yield
    finally:
        _given.reset(token)


def keep_options(options: Mapping[str, Any]) -> None:
    """Open every URL with these storage options from now on, in all threads, unless a call gives others: a server's
    threads do not inherit the options of :func:`with_options`.
    """
    global _kept
    _kept = dict(options)


def current_options() -> Mapping[str, Any]:
    """Return the storage options for a URL that comes without any."""
    return _given.get() or _kept


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value


def parse(text: str) -> Location:
    """Split a URL.

    Raises:
        NotACheckpointError: it names no host or not a valid one, contains a NUL byte, leaves its host with ``..``, or
            has a query that its scheme does not know.
    """
    match = _URL.fullmatch(text)
    assert match is not None, "is_url() is asked first"
    if match[3]:
        slip = f"{match[3].lower()}:/…"
        raise NotACheckpointError(f"{slip!r} has one slash after the scheme; write {match[3].lower()}://")
    scheme, rest = match[1].lower(), match[2]
    scheme = ALIASES.get(scheme, scheme)
    query = ""
    if scheme in ("http", "https"):
        rest, _, query = rest.partition("#")[0].partition("?")
        host, _, key = rest.partition("/")
        key = unquote(key)
    else:
        host, _, key = rest.partition("/")
    user, at, host = host.rpartition("@")
    if scheme == "file":
        raise NotACheckpointError("a file:// URL names a path of this machine, without '?' and '#'; write the path")
    if scheme in ("http", "https"):
        port = _HOST.fullmatch(host)
        if port is None or int(port[1] or 0) > 65_535:
            shown = "its host" if "@" in text else f"its host {host!r}"
            raise NotACheckpointError(
                f"'{scheme}://…': {shown} is not a name or a name:port (in a password, write %2F for '/', %40 for '@')"
            )
    elif scheme not in NAMES and "=" in key.partition("?")[2]:
        key = key.partition("?")[0]
        raise NotACheckpointError(
            f"{Location(scheme, host, key).shown!r} is followed by a query, which only http:// and https:// URLs have; "
            "set the credentials in the environment or in storage_options"
        )
    location = Location(scheme, host, "/".join(part for part in key.split("/") if part), query, user if at else "")
    if "\0" in key or ".." in location.key.split("/"):
        raise NotACheckpointError(f"{location.shown!r} contains '..' or a NUL byte")
    if not host and scheme != "memory":
        raise NotACheckpointError(f"{location.shown!r} names no host or bucket")
    return location
