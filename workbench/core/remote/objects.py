"""The calls that a store answers (head, get a range, list), by the library that knows it.

s3, gs, az, http and https go through obstore; ``hf`` through huggingface_hub for names and obstore for bytes; every
other scheme through fsspec. Credentials come from the environment and the profiles that these libraries read, and from
``storage_options``; neither is kept anywhere else, shown, or pickled.
"""

from __future__ import annotations

import base64
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import lru_cache, partial
from html.parser import HTMLParser
from typing import Any, NoReturn, Protocol, TypeVar
from urllib.parse import quote, unquote, urlsplit

import numpy as np

from workbench.core.arrays import Array
from workbench.core.remote.requests import IN_FLIGHT, UnansweredError, answered, arrived, pause, together
from workbench.core.remote.url import Location, parse
from workbench.core.source import FileStat, changed, rewritten
from workbench.core.words import plural
from workbench.errors import (
    ChangedError,
    MissingExtraError,
    MissingFileError,
    NotACheckpointError,
    OpenError,
    UnsupportedFormatError,
    UsageError,
    WorkbenchError,
    WriteError,
)

Options = Mapping[str, Any]
R = TypeVar("R")
#: Time without a byte after which an attempt is abandoned, and time in which a request gets an answer, in all attempts.
STALL, DEADLINE = timedelta(seconds=20), timedelta(seconds=60)
RETRIES = 4  #: of obstore's, in 1 to 2 s
#: Seconds of the pauses between further rounds of attempts while a store answers that it is overloaded.
PAUSES = (1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 10.0)
BUSY = ("408", "429", "500", "502", "503", "504")  #: answers after which a request is made again
#: Seconds in which a store served no request, after which it counts as gone: then one every :data:`PROBE` s waits.
GONE, PROBE = 120.0, 5.0
#: Retries of each request of an upload, and the time for all: a failure would lose what was sent before.
RETRIES_SENT, LONG = 20, timedelta(minutes=15)
ARRIVED = 256 << 10  #: bytes of a body that are copied at a time
BACKOFF: dict[str, Any] = {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=5), "base": 2}
PAGE = 1000  #: objects that a listing requests at a time
FOLDERS, DEPTH = 256, 8  #: folders of a server, and levels, up to which everything below a folder is listed at once
_MEMORY = threading.Lock()  #: fsspec's memory has no conditional writes of its own
HTML_LIMIT = 4 << 20  #: bytes of the largest page of links that is read
SENT_AT_ONCE = 8 << 20  #: largest object that is sent in one request; larger ones are sent in parts
ENCODED = ("gzip", "br", "zstd", "deflate")  #: encodings of a server under which ranges are not those of the file
PARTS, PARTS_AT_ONCE = 9_000, 8  #: parts of an object (S3 takes 10,000), and how many are sent at the same time
DENIED = ("UnauthenticatedError", "PermissionDeniedError")  #: obstore's errors
#: obstore's reasons for which an answer is not the byte range that was asked for.
NO_RANGES = ("MissingContentLength", "UnexpectedRange", "ParseContentRange", "NoContentRange", "Wanted range")
AGAIN = "try again later"
#: What obstore's description of a failed request contains → what the store did, and what to do.
REASONS = {
    "dns error": "could not be reached: its host name is unknown; check the URL and the network",
    "ConnectionRefused": f"could not be reached: the connection was refused; check host and port, or {AGAIN}",
    "InvalidContentType": "does not speak TLS; check the port, or begin the URL with http://",
    "InvalidCertificate": "has a TLS certificate that this machine does not trust; check the URL or the certificates",
    "TooManyRedirects": "redirects in a circle; check the URL",
    "TimedOut": f"did not answer in time; {AGAIN}",
    "IncompleteBody": f"cut the connection; {AGAIN}",
    "ConnectionReset": f"cut the connection; {AGAIN}",
    "IncompleteMessage": f"cut the connection; {AGAIN}",
}
TAKEN = ("AlreadyExistsError", "PreconditionError")  #: obstore's errors when a condition does not hold
COPIED_AT_ONCE = 5 << 30  #: bytes of the largest object that S3 copies in one request
ENDPOINTS = ("endpoint", "aws_endpoint", "aws_endpoint_url", "endpoint_url", "azure_storage_endpoint", "azure_endpoint")
CHECKSUM = "SHA256"  #: what S3 compares each request's body with; AWS_CHECKSUM_ALGORITHM and storage_options override
WRITABLE = ("s3", "gs", "az", "memory")  #: schemes of stores that show an object only once it is complete
Version = Mapping[str, Any]  #: a store's version of an object that was sent, to replace exactly this one later


class TooManyFolders(Exception):
    """A folder whose names cost a request each has more folders than are worth listing at once."""


class TakenError(Exception):
    """An object already exists, or is no longer the version that was to be replaced."""


class ObjectStore(Protocol):
    """Calls of one store, host or repository; keys are unquoted and relative to it.

    Attributes:
        pin: names the content of all objects, as a commit does; empty if only an object's own tag does.
    """

    pin: str

    def head(self, key: str) -> FileStat | None:
        """Return the identity of an object, or ``None`` if the key does not exist."""

    def look(self, key: str, nbytes: int) -> tuple[FileStat | None, Any] | None:
        """Request the identity and the first ``nbytes`` bytes; return ``None`` if one request cannot do both."""

    def get(self, key: str, name: str, start: int, stop: int, stat: FileStat, into: Array | None = None) -> memoryview:
        """Return bytes ``[start, stop)`` of an object; raise ChangedError if it has changed since ``stat``.

        Args:
            into: ``(stop - start,) uint8``, contiguous; receives the bytes as they arrive, and is returned.
        """

    def walk(self, folder: str) -> Iterator[tuple[str, FileStat | None]]:
        """Yield the keys of all objects below a folder; without a ``stat`` if the store does not list it.

        Raises:
            TooManyFolders: the store lists one folder at a time, and there are too many, or links form a cycle.
        """

    def listing(self, folder: str) -> tuple[dict[str, FileStat | None], list[str]]:
        """Return the objects directly in a folder by name, and the names of its subfolders."""


class WritableStore(ObjectStore, Protocol):
    """A store that objects can be sent to, each visible only once it is complete."""

    def put(self, key: str, data: bytes, only: Version | None = None) -> Version:
        """Send a small object. With ``only``, create it if absent (an empty version), or replace exactly that version.

        Raises:
            TakenError: it already exists, or is another version.
            WriteError: the store refuses.
        """

    def version(self, key: str) -> Version | None:
        """Return the version of an object, or ``None``."""

    def send(self, key: str, size: int, parts: Iterable[bytes]) -> None:
        """Send an object of any size; if ``parts`` raises, no object is created. Raises WriteError."""

    def copy(self, key: str, to: str, stat: FileStat) -> None:
        """Copy an object inside the store. Raises WriteError."""

    def remove(self, keys: Sequence[str]) -> None:
        """Remove those of the objects that exist. Raises WriteError."""


def connect(at: Location, options: Options) -> ObjectStore:
    """Connect to the store of a location; nothing is requested yet.

    Raises:
        MissingExtraError: the library that knows the scheme is not installed.
        UsageError: an option is unknown.
    """
    if at.scheme in ("http", "https"):
        return _Web(at, options)
    if at.scheme in ("s3", "gs", "az"):
        return _Cloud(at, options)
    if at.scheme == "hf":
        return _Hub(at, options)
    kind = {"memory": _Memory, "webhdfs": _WebHdfs}.get(at.scheme, _Other)
    return kind(at, options)


# ---- obstore ---------------------------------------------------------------------------------------------------------


class _Silence:
    """How long a store has served no request: a pass over many tensors does not wait the whole deadline for each."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answer = 0.0  # when the last answer came
        self._since: float | None = None  # when the first request began that had none after that
        self._probe = 0.0  # when the next request may wait for one

    @contextmanager
    def watched(self, where: str) -> Iterator[None]:
        """Note whether the block, a request, was answered.

        Raises:
            UnansweredError: no request was served for :data:`GONE` seconds, and another one has just tried.
        """
        began = time.monotonic()
        with self._lock:
            silent = 0.0 if self._since is None else began - self._since
            if silent > GONE and began < self._probe:
                raise UnansweredError(f"{where}: the store has served no request for {silent:,.0f} s; try again later")
            self._probe = began + PROBE
        try:
            yield
        except Exception as error:
            if _is_answer(error):
                self._answered()
            else:
                with self._lock:
                    self._since = self._since or max(began, self._answer)
            raise
        self._answered()

    def _answered(self) -> None:
        with self._lock:
            self._answer, self._since = time.monotonic(), None


class _Cloud:
    """S3, Google Cloud Storage and Azure."""

    pin = ""
    _advice = "set credentials that the store accepts, in the environment or in storage_options"

    def __init__(self, at: Location, options: Options) -> None:
        self._at = at
        try:
            import obstore
            from obstore.store import from_url
        except ModuleNotFoundError:
            raise _lacking(at, "obstore") from None
        self._obstore: Any = obstore
        connect_to: Any = from_url
        given = dict(options)
        own_client, own_retry = (mapping(given, name) for name in ("client_options", "retry_config"))
        client: dict[str, Any] = {"connect_timeout": STALL, "read_timeout": STALL, "timeout": DEADLINE} | own_client
        # times and retries that the caller sets replace these
        self._deadline = None if own_retry or "timeout" in own_client else DEADLINE.total_seconds()
        self._pauses = () if own_retry else PAUSES
        self._silence = _Silence()
        if at.user and at.web:
            user = base64.b64encode(unquote(at.user).encode()).decode()
            client["default_headers"] = {"authorization": f"Basic {user}"} | dict(client.get("default_headers", {}))
        endpoints = [value for name, value in (*given.items(), *os.environ.items()) if name.lower() in ENDPOINTS]
        for endpoint in endpoints:
            if not re.match(r"https?://", str(endpoint)):  # obstore would panic
                raise UsageError(f"the endpoint {str(endpoint)!r} is not a URL: begin it with http:// or https://")
        if at.scheme == "http" or any(map(_plain, (*given.values(), *endpoints))):
            client.setdefault("allow_http", True)
        if at.scheme == "s3" and _by_profile(given):
            given["credential_provider"] = _boto3_credentials(at)
        if at.scheme == "s3" and "AWS_CHECKSUM_ALGORITHM" not in os.environ:
            given.setdefault("checksum_algorithm", CHECKSUM)
        if given.get("checksum_algorithm", CHECKSUM) is None:
            del given["checksum_algorithm"]  # for a store that knows none

        def store(retry: dict[str, Any]) -> Any:
            return connect_to(self._base(at), client_options=client, retry_config=retry | own_retry, **given)

        retry: dict[str, Any] = {"max_retries": RETRIES, "retry_timeout": DEADLINE, "backoff": BACKOFF}
        sent = retry | {"max_retries": RETRIES_SENT, "retry_timeout": LONG}
        self._patient = lru_cache(1)(lambda: store(sent))
        try:
            self._store = store(retry)
        except Exception as error:  # of obstore's own family, which has no common base for configuration
            why = "cannot be used with these storage options" if options else "cannot be used"
            raise UsageError(f"{at.shown!r} {why}: {_words(error)}") from None

    def _base(self, at: Location) -> str:
        return f"{at.scheme}://{at.host}"

    def _path(self, key: str) -> str:
        return key

    def _tried(self, name: str, call: Callable[[], R], pauses: Sequence[float] | None = None) -> R:
        """Make a request, and again while the store answers that it is overloaded."""
        where = f"{name!r} in {self._at.host!r}"
        late = f"{where}: the store sent nothing for {self._deadline or 0:g} s; try again later"
        with self._silence.watched(where), answered(self._deadline, late):
            for seconds in self._pauses if pauses is None else pauses:
                try:
                    return call()
                except Exception as error:
                    if _answer(error)[1] not in BUSY:
                        raise
                pause(seconds)
            return call()

    def head(self, key: str) -> FileStat | None:
        try:
            return _stat(self._tried(key, lambda: self._obstore.head(self._store, key)))
        except FileNotFoundError:
            return None
        except Exception as error:
            self._explain(error, key)

    def look(self, key: str, nbytes: int) -> tuple[FileStat | None, Any] | None:
        def look() -> tuple[FileStat | None, Any]:
            reply = self._obstore.get(self._store, self._path(key), options={"range": (0, nbytes)})
            if self._is_page(reply):
                return None, b""
            stat = _stat(reply.meta)
            return stat, self._complete(reply, (reply.bytes(),), 0, min(nbytes, stat.size), key, None)

        try:
            return self._tried(key, look)
        except FileNotFoundError:
            return None, b""
        except Exception as error:
            if type(error).__name__ != "NotSupportedError" and _answer(error)[1] != "416":
                self._explain(error, key)
            return None  # the object is empty, or the server knows no ranges

    def get(self, key: str, name: str, start: int, stop: int, stat: FileStat, into: Array | None = None) -> memoryview:
        wanted: dict[str, Any] = {"range": (start, stop)}
        if stat.tag:
            wanted["if_match"] = stat.tag

        def get() -> memoryview:
            reply = self._obstore.get(self._store, key, options=wanted)
            now = _stat(reply.meta)
            if now.size != stat.size:  # a store that ignores If-Match
                raise changed(name, stat.size, now.size)
            if stat.tag and now.tag:
                if now.tag.strip('"') != stat.tag.strip('"'):
                    raise rewritten(name)
            elif stat.mtime_ns and now.mtime_ns != stat.mtime_ns:  # a server without ETags
                raise rewritten(name)
            # bytes() would hold the pieces of the body and their copy at the same time, both in fresh memory
            whole = into is None or len(into) <= ARRIVED
            pieces = (reply.bytes(),) if whole else reply.stream(min_chunk_size=ARRIVED)
            return self._complete(reply, pieces, start, stop, name, into)

        try:
            return self._tried(name, get)
        except Exception as error:
            self._explain(error, name, stat)

    def _complete(
        self, reply: Any, pieces: Iterable[Any], start: int, stop: int, name: str, into: Array | None
    ) -> memoryview:
        try:
            return complete(pieces, start, stop, name, into)
        except ChangedError:
            if (encoding := str(reply.attributes.get("Content-Encoding", ""))) not in ENCODED:
                raise
            raise UnsupportedFormatError(
                f"{name!r} in {self._at.host!r}: the server compresses the file (Content-Encoding: {encoding}), so its "
                "byte ranges are not those of the file; turn this off for checkpoints, or download the file"
            ) from None

    def _is_page(self, reply: Any) -> bool:
        """Return whether a reply is a page, as of a folder's links or a missing file; no checkpoint has such a file."""
        return str(reply.attributes.get("Content-Type", "")).startswith("text/html")

    def walk(self, folder: str) -> Iterator[tuple[str, FileStat | None]]:
        def first() -> tuple[Any, Any]:
            pages = self._obstore.list(self._store, _prefix(folder), chunk_size=PAGE)
            return pages, next(pages, None)

        try:
            pages, page = self._tried(folder, first)
            while page is not None:
                yield from ((one["path"], _stat(one)) for one in page)
                page = self._tried(folder, lambda: next(pages, None), pauses=())  # an error ends the iterator
        except Exception as error:
            self._explain(error, folder)

    def listing(self, folder: str) -> tuple[dict[str, FileStat | None], list[str]]:
        try:
            found = self._tried(folder, lambda: self._obstore.list_with_delimiter(self._store, _prefix(folder)))
        except Exception as error:
            self._explain(error, folder)
        files: dict[str, FileStat | None] = {one["path"].rpartition("/")[2]: _stat(one) for one in found["objects"]}
        return files, [path.rstrip("/").rpartition("/")[2] for path in found["common_prefixes"]]

    def put(self, key: str, data: bytes, only: Version | None = None) -> Version:
        known = {name: value for name, value in (only or {}).items() if value is not None}
        mode: Any = "overwrite" if only is None else known or "create"
        try:
            made: Version = self._tried(
                key, lambda: self._obstore.put(self._store, key, data, mode=mode, use_multipart=False)
            )
        except Exception as error:
            if only is not None and (type(error).__name__ in TAKEN or _answer(error)[1] in ("409", "412")):
                raise TakenError(key) from None
            self._refused(error, key)
        return made

    def version(self, key: str) -> Version | None:
        try:
            found = self._tried(key, lambda: self._obstore.head(self._store, key))
        except FileNotFoundError:
            return None
        except Exception as error:
            self._refused(error, key)
        return {"e_tag": found["e_tag"], "version": found["version"]}

    def send(self, key: str, size: int, parts: Iterable[bytes]) -> None:
        try:
            if size <= SENT_AT_ONCE:
                self._obstore.put(self._patient(), key, b"".join(parts), use_multipart=False)
                return
            part = max(SENT_AT_ONCE, -(-size // PARTS))
            self._obstore.put(self._patient(), key, iter(parts), chunk_size=part, max_concurrency=PARTS_AT_ONCE)
        except Exception as error:
            self._refused(error, key, rounds=1)

    def copy(self, key: str, to: str, stat: FileStat) -> None:
        try:
            if stat.size <= COPIED_AT_ONCE:
                self._obstore.copy(self._patient(), key, to)
                return
            part = max(SENT_AT_ONCE, -(-stat.size // PARTS))
            # not by an iterator: obstore calls it while no other call into obstore is possible
            store = self._patient()
            with self._obstore.open_writer(store, to, buffer_size=part, max_concurrency=PARTS_AT_ONCE) as into:
                for at in range(0, stat.size, SENT_AT_ONCE):
                    into.write(self.get(key, key, at, min(at + SENT_AT_ONCE, stat.size), stat))
        except Exception as error:
            self._refused(error, to, rounds=1)

    def remove(self, keys: Sequence[str]) -> None:
        try:
            if self._at.scheme == "s3":
                self._tried(keys[0], lambda: self._obstore.delete(self._store, list(keys)))
                return
            for key in keys:
                with suppress(FileNotFoundError):
                    self._tried(key, partial(self._obstore.delete, self._store, key))
        except Exception as error:
            self._refused(error, next(iter(keys), ""))

    def _refused(self, error: BaseException, name: str, *, rounds: int | None = None) -> NoReturn:
        """Raise one of our errors for what obstore says of a write.

        Args:
            rounds: how often obstore was asked; by default once, and once after each pause.
        """
        if isinstance(error, (WorkbenchError, KeyboardInterrupt)):
            raise error
        kind, status, answer = _answer(error, rounds or len(self._pauses) + 1)
        where = f"{name!r} in {self._at.host!r}"
        if isinstance(error, FileNotFoundError) or status == "404":
            raise WriteError(f"{where} cannot be written: there is no such bucket, or the object is gone") from None
        if kind in DENIED or status in ("401", "403"):
            raise WriteError(f"no permission to write {where}: {self._advice}") from None
        raise WriteError(f"{where} was not written: the store {answer}") from None

    def _explain(self, error: BaseException, name: str, stat: FileStat | None = None) -> NoReturn:
        """Raise one of our errors for one of obstore's."""
        if isinstance(error, (OpenError, KeyboardInterrupt)):
            raise error
        kind, status, answer = _answer(error, len(self._pauses) + 1)
        where = f"{name!r} in {self._at.host!r}"
        if (isinstance(error, FileNotFoundError) or status == "404") and stat is None:
            raise NotACheckpointError(f"{self._at.shown!r} does not exist") from None
        if isinstance(error, FileNotFoundError) or status == "404":
            raise MissingFileError(f"file {where} does not exist; restore it or save again") from None
        if kind in DENIED or status in ("401", "403"):
            raise MissingFileError(f"no permission to read {where}: {self._advice}") from None
        if kind == "PreconditionError" or status == "412":
            raise rewritten(name) from None
        if status == "416" and stat is not None:
            raise ChangedError(f"file {name!r} is shorter than when the checkpoint was opened; open it again") from None
        if kind == "NotSupportedError" or "non-partial response" in str(error):
            raise UnsupportedFormatError(
                f"{where}: the server ignores byte ranges and would send the whole file for every tensor; download the "
                "checkpoint and open the copy"
            ) from None
        if any(sign in str(error) for sign in NO_RANGES):
            raise UnsupportedFormatError(
                f"{where}: the server answers a request for a byte range with something else ({_words(error)}); "
                "download the checkpoint and open the copy"
            ) from None
        raise UnansweredError(f"{where} was not read: the store {answer}") from None


class _Web(_Cloud):
    """A server that knows byte ranges. It lists a folder only as a page of links, if at all.

    Attributes:
        pages: whether it answered with a page that is not a folder's.
    """

    _advice = "write https://USER:PASSWORD@HOST/… (with %40 for @, %2F for /), or use a signed URL"

    def _base(self, at: Location) -> str:
        self.pages = False
        self._only = at.key if at.query else None  # a signature is of this one object
        if at.query:
            return f"{at.scheme}://{at.host}/{quote(at.key)}?{at.query}"
        return f"{at.scheme}://{at.host}"

    def head(self, key: str) -> FileStat | None:
        # a URL that is signed for GET does not allow HEAD
        wanted = {"head": True} if self._only is None else {"range": (0, 1)}

        def head(wanted: Options) -> FileStat | None:
            reply = self._obstore.get(self._store, self._path(key), options=wanted)
            return None if self._is_page(reply) else _stat(reply.meta)

        try:
            return self._tried(key, lambda: head(wanted))
        except FileNotFoundError:
            return None
        except Exception as error:
            if type(error).__name__ == "NotSupportedError" and self._is_page_at(key):
                return None
            self._explain(error, key)

    def get(self, key: str, name: str, start: int, stop: int, stat: FileStat, into: Array | None = None) -> memoryview:
        try:
            return super().get(self._path(key), name, start, stop, stat, into)
        except UnsupportedFormatError:
            if not self._is_page_at(key):
                raise
            raise MissingFileError(
                f"{name!r} in {self._at.host!r}: the server sent an HTML page instead of the file (a login page?); "
                "check the credentials, and open it again"
            ) from None

    def _is_page(self, reply: Any) -> bool:
        found = super()._is_page(reply)
        self.pages = self.pages or found
        return found

    def _is_page_at(self, key: str) -> bool:
        """Return whether the server sends a page for any request of a key; its body is left unread."""
        with suppress(Exception):
            return self._is_page(self._obstore.get(self._store, self._path(key)))
        return False

    def walk(self, folder: str) -> Iterator[tuple[str, FileStat | None]]:
        level, listed, depth = [folder], 0, 0
        while level:
            listed, depth = listed + len(level), depth + 1
            if listed > FOLDERS or depth > DEPTH:
                raise TooManyFolders
            found = together(self.listing, level)
            paths = [f"{above}/" if above else "" for above in level]
            yield from ((above + name, None) for above, (files, _) in zip(paths, found, strict=True) for name in files)
            level = [above + name for above, (_, folders) in zip(paths, found, strict=True) for name in folders]

    def listing(self, folder: str) -> tuple[dict[str, FileStat | None], list[str]]:
        if self._only is not None:
            raise NotACheckpointError(
                f"{self._at.shown!r}: the server has no such file, or sent an HTML page instead (a login page? or a "
                "folder: leave the query out to open that)"
            )

        def fetch() -> str:
            reply = self._obstore.get(self._store, f"{folder}/" if folder else "")
            if reply.meta["size"] > HTML_LIMIT:
                raise self._unlisted(folder)
            return bytes(reply.bytes()).decode("utf-8", "replace")

        try:
            page = self._tried(folder, fetch)
        except FileNotFoundError:
            return {}, []
        except Exception as error:
            self._explain(error, folder)
        links = _Links()
        links.feed(page)
        if not links.html:
            raise self._unlisted(folder)
        files: dict[str, FileStat | None] = {}
        folders = []
        for link in links.found:
            parts = urlsplit(link)
            name = unquote(parts.path)
            if parts.scheme or parts.netloc or parts.query or not name or name.startswith(("/", "../", "./")):
                continue
            if name.endswith("/") and "/" not in name[:-1]:
                folders.append(name[:-1])
            elif "/" not in name:
                files[name] = None
        return files, folders

    def _path(self, key: str) -> str:
        return "" if self._only is not None and key == self._only else key

    def _unlisted(self, folder: str) -> OpenError:
        return NotACheckpointError(
            f"{self._at.shown!r}: the server does not list folders; give the URL of a file, or copy the folder"
        )


def listing_of(
    walked: Iterable[tuple[str, FileStat | None]], folder: str
) -> tuple[dict[str, FileStat | None], list[str]]:
    """Return the objects directly in a folder, and its subfolders, from the keys of all objects below it."""
    files: dict[str, FileStat | None] = {}
    folders: dict[str, None] = {}
    for key, stat in walked:
        name, slash, _ = key[len(folder) + 1 :].partition("/")
        if slash:
            folders[name] = None
        else:
            files[name] = stat
    return files, list(folders)


class _Links(HTMLParser):
    """Targets of a page's links."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.html = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.html = True
        if tag == "a":
            self.found += [value for name, value in attrs if name == "href" and value]


# ---- the Hugging Face hub --------------------------------------------------------------------------------------------


class _Hub:
    """A repository of models at one commit: ``hf://user/repo@revision/folder``."""

    def __init__(self, at: Location, options: Options) -> None:
        try:
            from huggingface_hub import HfApi
            from huggingface_hub.utils import HfHubHTTPError
        except ModuleNotFoundError:
            raise MissingExtraError(f"{at.shown!r} needs huggingface_hub: pip install huggingface_hub") from None
        self._folder, _, _ = at.key.partition("/")
        name, _, revision = self._folder.partition("@")
        if not name:
            raise NotACheckpointError(f"{at.shown!r} names no repository: write hf://user/repo")
        given = dict(options)
        api = HfApi(endpoint=given.pop("endpoint", None), token=given.pop("token", None))
        repo = f"{at.host}/{name}"
        try:
            info = api.model_info(repo, revision=unquote(revision) or None, files_metadata=True)
        except HfHubHTTPError as error:
            status = error.response.status_code if error.response is not None else 0
            why = {
                401: "it does not exist, or is private: set HF_TOKEN",
                403: "access to it must be requested",
                404: "no such revision",
            }.get(status, f"the hub answered {status}")
            raise NotACheckpointError(f"{at.shown!r} cannot be opened: {why}") from None
        except ValueError as error:
            raise NotACheckpointError(f"{at.shown!r} cannot be opened: {_words(error)}") from None
        except Exception as error:  # of the library that it makes requests with, which is not always the same
            raise OpenError(f"{at.shown!r}: the hub could not be reached: {_words(error)}; try again later") from None
        # a commit never changes, so its files need no tag
        self.pin = str(info.sha or "")
        self._files = {one.rfilename: FileStat(one.size or 0, 0) for one in info.siblings or []}
        headers = {"authorization": f"Bearer {api.token}"} if isinstance(api.token, str) else {}
        client = mapping(given, "client_options")
        client["default_headers"] = headers | dict(client.get("default_headers", {}))
        web = parse(f"{api.endpoint}/{repo}/resolve/{info.sha}")
        self._web, self._above = _Web(web, given | {"client_options": client}), web.key

    def head(self, key: str) -> FileStat | None:
        return self._files.get(self._inside(key))

    def look(self, key: str, nbytes: int) -> tuple[FileStat | None, Any] | None:
        return None

    def get(self, key: str, name: str, start: int, stop: int, stat: FileStat, into: Array | None = None) -> memoryview:
        return self._web.get(f"{self._above}/{self._inside(key)}", name, start, stop, stat, into)

    def walk(self, folder: str) -> Iterator[tuple[str, FileStat | None]]:
        for path, stat in self._files.items():
            key = f"{self._folder}/{path}"
            if key.startswith(f"{folder}/"):
                yield key, stat

    def listing(self, folder: str) -> tuple[dict[str, FileStat | None], list[str]]:
        return listing_of(self.walk(folder), folder)

    def _inside(self, key: str) -> str:
        return key.removeprefix(f"{self._folder}/")


# ---- fsspec ----------------------------------------------------------------------------------------------------------


class _Other:
    """Any other scheme."""

    pin = ""

    def __init__(self, at: Location, options: Options) -> None:
        self._at = at
        try:
            import fsspec
        except ModuleNotFoundError:
            raise _lacking(at, "fsspec") from None
        try:
            user = f"{at.user}@" if at.user else ""
            from_url = fsspec.get_filesystem_class(at.scheme)._get_kwargs_from_urls(f"{at.scheme}://{user}{at.host}/")
            self._system = fsspec.filesystem(at.scheme, **from_url | dict(options))
        except ImportError as error:
            raise MissingExtraError(f"{at.shown!r} needs another package: {_words(error)}") from None
        except ValueError:
            raise NotACheckpointError(f"{at.shown!r}: the scheme {at.scheme!r} is unknown") from None
        except OSError as error:
            if at.scheme != "hdfs":
                raise OpenError(f"{at.shown!r} could not be reached: {_words(error)}") from None
            raise MissingExtraError(
                f"{at.shown!r} needs a Java runtime, Hadoop's libhdfs, and CLASSPATH set to Hadoop's jars "
                f"({_words(error)}); webhdfs:// needs none of these"
            ) from None
        except Exception as error:
            raise UsageError(f"{at.shown!r} cannot be used with these storage options: {_words(error)}") from None

    def head(self, key: str) -> FileStat | None:
        try:
            info = self._system.info(self._path(key))
        except FileNotFoundError:
            return None
        except Exception as error:
            self._explain(error, key)
        return _info_stat(info) if info["type"] == "file" else None

    def look(self, key: str, nbytes: int) -> tuple[FileStat | None, Any] | None:
        return None

    def get(self, key: str, name: str, start: int, stop: int, stat: FileStat, into: Array | None = None) -> memoryview:
        try:
            data = self._system.cat_file(self._path(key), start=start, end=stop)
        except Exception as error:
            self._explain(error, name)
        return complete((data,), start, stop, name, into)

    def walk(self, folder: str) -> Iterator[tuple[str, FileStat | None]]:
        try:
            found = self._system.find(self._path(folder), detail=True)
        except FileNotFoundError:
            return
        except Exception as error:
            self._explain(error, folder)
        base = self._path("")
        for path, info in found.items():
            yield path.removeprefix(base).lstrip("/"), _info_stat(info)

    def listing(self, folder: str) -> tuple[dict[str, FileStat | None], list[str]]:
        try:
            found = self._system.ls(self._path(folder), detail=True)
        except FileNotFoundError:
            return {}, []
        except Exception as error:
            self._explain(error, folder)
        files: dict[str, FileStat | None] = {}
        folders = []
        for info in found:
            name = info["name"].rstrip("/").rpartition("/")[2]
            if info["type"] == "directory":
                folders.append(name)
            else:
                files[name] = _info_stat(info)
        return files, folders

    def _path(self, key: str) -> str:
        path = f"{self._at.host}/{key}" if key else self._at.host
        return str(self._system._strip_protocol(f"{self._at.scheme}://{path}"))

    def _explain(self, error: BaseException, name: str) -> NoReturn:
        if isinstance(error, (OpenError, KeyboardInterrupt)):
            raise error
        where = f"{name!r} in {self._at.shown!r}"
        if isinstance(error, FileNotFoundError):
            raise MissingFileError(f"{where} does not exist; restore it or save again") from None
        if isinstance(error, PermissionError):
            raise MissingFileError(f"no permission to read {where}: set credentials that the store accepts") from None
        raise OpenError(f"{where} was not read: {type(error).__name__}: {_words(error)}; try again later") from None


class _Memory(_Other):
    """fsspec's memory of this process: its only store that shows an object only when it is complete."""

    def put(self, key: str, data: bytes, only: Version | None = None) -> Version:
        path = self._path(key)
        with _MEMORY:
            if only is not None and self.version(key) != (dict(only) or None):
                raise TakenError(key)
            self._system.pipe_file(path, data)
            return self.version(key) or {}

    def version(self, key: str) -> Version | None:
        path = self._path(key)
        return {"created": self._system.created(path)} if self._system.exists(path) else None

    def send(self, key: str, size: int, parts: Iterable[bytes]) -> None:
        self._system.pipe_file(self._path(key), b"".join(parts))

    def copy(self, key: str, to: str, stat: FileStat) -> None:
        self._system.pipe_file(self._path(to), self._system.cat_file(self._path(key)))

    def remove(self, keys: Sequence[str]) -> None:
        for key in keys:
            with suppress(FileNotFoundError):
                self._system.rm_file(self._path(key))


class _WebHdfs(_Other):
    """HDFS by its REST interface, which redirects each read to the node that has the bytes."""

    def __init__(self, at: Location, options: Options) -> None:
        super().__init__(at, options)
        from requests.adapters import HTTPAdapter
        from urllib3 import Retry

        class Adapter(HTTPAdapter):
            def send(self, *given: Any, **how: Any) -> Any:
                return super().send(*given, **how | {"timeout": STALL.total_seconds()})

        again = Retry(
            RETRIES,
            status_forcelist=(408, 429, 502, 503, 504),
            backoff_factor=BACKOFF["init_backoff"].total_seconds(),
            raise_on_status=False,
        )
        for scheme in ("http://", "https://"):
            self._system.session.mount(scheme, Adapter(pool_maxsize=IN_FLIGHT, max_retries=again))

    def get(self, key: str, name: str, start: int, stop: int, stat: FileStat, into: Array | None = None) -> memoryview:
        # fsspec's own way to a range asks for the status first, reads 5 MB ahead, and does so one file at a time
        try:
            reply = self._system._call("OPEN", path=self._path(key), offset=start, length=stop - start)
        except Exception as error:
            self._explain(error, name)
        return complete((reply.content,), start, stop, name, into)

    def _path(self, key: str) -> str:
        return f"/{key}"


# ---- common ----------------------------------------------------------------------------------------------------------


def complete(pieces: Iterable[Any], start: int, stop: int, name: str, into: Array | None) -> memoryview:
    """Collect a body that arrives in pieces, into ``into`` if given; raise ChangedError if it is too short."""
    sent, data = 0, memoryview(b"")
    for piece in pieces:
        arrived()
        data = memoryview(piece)
        if into is not None and sent + len(data) <= len(into):
            into[sent : sent + len(data)] = np.frombuffer(data, np.uint8)
        sent += len(data)
    if sent != stop - start:
        raise ChangedError(
            f"file {name!r}: the store sent {plural(sent, 'byte')} instead of {stop - start:,} from byte {start:,} on; "
            "it was shortened, open it again"
        )
    return data if into is None else memoryview(into)


def _answer(error: BaseException, rounds: int = 1) -> tuple[str, str, str]:
    """Return the kind and status of an obstore error, and in words the store's answer and what to do.

    Args:
        rounds: how often the request was made anew if the store was overloaded.
    """
    text = _words(error)
    status = next(iter(re.findall(r"status(?: code)?:? (\d{3})", text)), "")
    if status:
        tries = (int(next(iter(re.findall(r"after (\d+) retries", text)), 0)) + 1) * (rounds if status in BUSY else 1)
        again = f" {tries} times" if tries > 1 else ""
        answer = f"answered {status}{again}; {AGAIN if status in BUSY else 'check the URL and the storage options'}"
    else:
        unknown = f"could not be reached: {text.rpartition(' - ')[2]}; {AGAIN}"
        answer = next((said for sign, said in REASONS.items() if sign in str(error)), unknown)
    return type(error).__name__, status, answer


def _is_answer(error: Exception) -> bool:
    """Return whether an error says what a store answered, not that it did not, or only that it is overloaded."""
    status = _answer(error)[1]
    if status or type(error).__name__ != "GenericError":
        return status not in BUSY
    return any(sign in str(error) for sign in NO_RANGES)


def _stat(meta: Mapping[str, Any]) -> FileStat:
    return FileStat(int(meta["size"]), int(meta["last_modified"].timestamp() * 1e9), meta.get("e_tag") or "")


def _info_stat(info: Mapping[str, Any]) -> FileStat:
    tag = info.get("ETag") or info.get("etag") or info.get("e_tag") or ""
    when = info.get("LastModified") or info.get("mtime") or info.get("created") or info.get("modificationTime") or 0
    seconds = when.timestamp() if hasattr(when, "timestamp") else when if isinstance(when, (int, float)) else 0
    return FileStat(int(info["size"]), int(seconds * 1e9), str(tag))


def _prefix(folder: str) -> str | None:
    return f"{folder}/" if folder else None


def mapping(given: dict[str, Any], name: str) -> dict[str, Any]:
    """Take an option that is a mapping itself."""
    value = given.pop(name, {})
    if not isinstance(value, Mapping):
        raise UsageError(f"the storage option {name} is {value!r}; give a dict of options, which only Python code can")
    return dict(value)


def _plain(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("http://")


def _by_profile(given: Options) -> bool:
    """Return whether the keys of an S3 bucket are in a profile, which obstore itself does not read."""
    keys = {"access_key_id", "aws_access_key_id", "skip_signature", "aws_skip_signature", "credential_provider"}
    if keys & set(given) or "AWS_ACCESS_KEY_ID" in os.environ:
        return False
    home = os.path.expanduser("~/.aws")
    files = (
        os.environ.get("AWS_SHARED_CREDENTIALS_FILE"),
        os.environ.get("AWS_CONFIG_FILE"),
        f"{home}/credentials",
        f"{home}/config",
    )
    return "AWS_PROFILE" in os.environ or any(file and os.path.exists(file) for file in files)


def _boto3_credentials(at: Location) -> Any:
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ModuleNotFoundError:
        raise MissingExtraError(
            f"{at.shown!r}: the keys are in an AWS profile, which boto3 reads; pip install boto3, or set "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        ) from None
    return Boto3CredentialProvider()


def _lacking(at: Location, package: str) -> MissingExtraError:
    return MissingExtraError(f"{at.shown!r} needs {package}: pip install 'ckpt-workbench[remote]'")


def _words(error: BaseException) -> str:
    """Return the first line of a library's message without URLs and queries, which may hold signatures and tokens."""
    text = str(error).split("\n")[0].strip()
    text = re.sub(r"\b[a-z][a-z0-9+.-]*://\S+", "(URL)", text)
    return re.sub(r"\?[^\s'\"]*=[^\s'\"]*", "?(query)", text)[:300] or type(error).__name__
