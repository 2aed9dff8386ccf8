"""ROOT, the folder, or the prefix of a bucket, that the dashboard may not leave.

Every checkpoint named from outside (the picker, ``?ckpt=`` in the URL, a bookmark) is a path *relative to ROOT* and
goes through :meth:`Jail.resolve`. Both paths are resolved first and compared by components: comparing string
prefixes would consider ``/ckpts-private`` a part of ``/ckpts`` (Panel 1.9.4's ``FileSelector`` does).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from workbench.core.remote.url import is_url, parse
from workbench.errors import MissingFileError, NotACheckpointError, UnsafeError, UsageError

_roots: set[str] = set()  # of this process


class Jail:
    """A folder; distinguishes paths inside it from those that only look so.

    Attributes:
        root: its real path.
        name: last component, for the page's title.
    """

    root: Path | str
    name: str

    def __init__(self, root: str | os.PathLike[str]) -> None:
        given = os.fspath(root)
        if "\0" in given:
            raise UsageError("ROOT contains a NUL byte")
        self.root = self._folder = Path(os.path.realpath(os.path.expanduser(given)))
        if not self._folder.is_dir():
            raise UsageError(f"ROOT {given!r} is not a folder; give the folder that contains the checkpoints")
        self.name = self._folder.name or str(self._folder)
        if self._folder.name:
            _roots.add(str(self._folder))

    @property
    def folder(self) -> Path:
        """ROOT on disk, where files can be written.

        Raises:
            UsageError: ROOT is in a store.
        """
        return self._folder

    def resolve(self, relative: str) -> Path | str:
        """Return the real path, or the URL, of a file or folder inside ROOT; ``.`` is ROOT itself.

        Raises:
            UnsafeError: the path is absolute, contains ``..`` or a NUL byte, or follows a symbolic link out of ROOT.
            MissingFileError: nothing exists there, or no file can have that name.
        """
        _refuse(relative)
        try:
            real = Path(os.path.realpath(self._folder / relative))
        except (OSError, UnicodeEncodeError):  # a lone surrogate
            raise MissingFileError(f"{relative!r} is not a valid file name; pick one from the list") from None
        if not real.is_relative_to(self._folder):
            raise UnsafeError(
                f"{relative!r} is a link that leaves ROOT; refused. Serve the folder it points to instead"
            )
        if not os.path.lexists(real):
            raise MissingFileError(
                f"{relative!r} does not exist under ROOT; it may have been deleted. Refresh the list"
            )
        return real

    def show(self, path: str | os.PathLike[str]) -> str:
        """Return a path inside ROOT as the page shows it: relative, with forward slashes.

        Raises:
            ValueError: it is not inside.
        """
        return Path(path).relative_to(self._folder).as_posix()

    def title(self, relative: str) -> str:
        """Return the heading of a page for a path inside ROOT."""
        return self.name if relative == "." else relative


class BucketJail(Jail):
    """Everything below a URL: objects have no links, so a name without ``..`` is inside.

    Attributes:
        root: the URL.
        name: last component, for the page's title.
    """

    def __init__(self, root: str) -> None:
        try:
            self._location = parse(root)
        except NotACheckpointError as error:
            raise UsageError(f"ROOT cannot be served: {error}") from None
        if self._location != self._location.public:
            raise UsageError(
                f"ROOT {self._location.shown!r} was given with a password or a signature; give credentials in the "
                "environment or with --storage-option instead"
            )
        self.root = self._location.shown
        self.name = self._location.name or self.root
        _roots.add(self.root)

    @property
    def folder(self) -> Path:
        raise UsageError(
            f"ROOT {self.root!r} is in a store, and the page exports to disk only; omit --allow-export, and use "
            "`workbench export` to write to a store"
        )

    def resolve(self, relative: str) -> str:
        _refuse(relative)
        path = "/".join(part for part in relative.split("/") if part not in ("", "."))
        return (self._location.at(path) if path else self._location).shown

    def show(self, path: str | os.PathLike[str]) -> str:
        text = os.fspath(path)
        if not is_url(text):
            raise ValueError(f"{text!r} is not below {self.root!r}")
        at, root = parse(text), self._location
        below = at.key.removeprefix(f"{root.key}/") if root.key else at.key
        if at[:2] != root[:2] or (root.key and below == at.key != root.key):
            raise ValueError(f"{at.shown!r} is not below {root.shown!r}")
        return "." if at.key == root.key else below


def jail_of(root: str | os.PathLike[str]) -> Jail:
    """Return the jail of a folder or of a URL.

    Raises:
        UsageError: it is not a folder, or not a URL that can be served.
    """
    given = os.fspath(root)
    return BucketJail(given) if is_url(given) else Jail(given)


def _refuse(relative: str) -> None:
    """Refuse names that cannot be inside any ROOT."""
    if not relative or "\0" in relative:
        raise UnsafeError(f"{relative!r} does not name a checkpoint; pick one from the list")
    if os.path.isabs(relative):
        raise UnsafeError(f"{relative!r} is an absolute path; name the checkpoint relative to ROOT, as the list does")
    if ".." in Path(relative).parts:
        raise UnsafeError(
            f"{relative!r} leaves ROOT through '..'; name the checkpoint relative to ROOT, as the list does"
        )


def relative_words(text: str) -> str:
    """Make the paths in a message relative to ROOT, whose location must not appear on the page."""
    return _relative(text, _roots)


def relative_html(markup: str) -> str:
    """Make the paths in HTML, escaped or not, relative to ROOT. Closing tags are not paths, even if ROOT is ``/b``."""
    return _relative(markup, _roots | {escape(root) for root in _roots}, "(?<!<)")


def _relative(text: str, roots: Iterable[str], before: str = "") -> str:
    for root in sorted(roots, key=len, reverse=True):
        if root in text:
            pattern = before + re.escape(root) + r"(/|(?![\w.-]))"
            text = re.sub(pattern, lambda found: "" if found[1] else "ROOT", text)
    return text


def relative_values(value: Any) -> Any:
    """Make the paths in plain values (dicts, lists, tuples, strings) relative to ROOT (:func:`relative_words`)."""
    if isinstance(value, str):
        return relative_words(value)
    if isinstance(value, Mapping):
        return {relative_values(key): relative_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(relative_values(item) for item in value)
    return value
