"""ROOT, the folder that the dashboard may not leave.

Every checkpoint named from outside (the picker, ``?ckpt=`` in the URL, a bookmark) is a path *relative to ROOT* and
goes through :meth:`Jail.resolve`. Both paths are resolved first and compared by components: comparing string
prefixes would consider ``/ckpts-private`` a part of ``/ckpts`` (Panel 1.9.4's ``FileSelector`` does).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from workbench.errors import MissingFileError, UnsafeError, UsageError

__all__ = ["Jail", "relative_values", "relative_words"]

_roots: set[str] = set()  # of this process


class Jail:
    """A folder; distinguishes paths inside it from those that only look so.

    Attributes:
        root: its real path.
        name: last component, for the page's title.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        given = os.fspath(root)
        if "\0" in given:
            raise UsageError("ROOT contains a NUL byte")
        self.root = Path(os.path.realpath(os.path.expanduser(given)))
        if not self.root.is_dir():
            raise UsageError(f"ROOT {given!r} is not a folder; give the folder that contains the checkpoints")
        self.name = self.root.name or str(self.root)
        if self.root.name:
            _roots.add(str(self.root))

    def resolve(self, relative: str) -> Path:
        """Return the real path of a file or folder inside ROOT; ``.`` is ROOT itself.

        Raises:
            UnsafeError: the path is absolute, contains ``..`` or a NUL byte, or follows a symbolic link out of ROOT.
            MissingFileError: nothing exists there, or no file can have that name.
        """
        if not relative or "\0" in relative:
            raise UnsafeError(f"{relative!r} does not name a checkpoint; pick one from the list")
        if os.path.isabs(relative):
            raise UnsafeError(
                f"{relative!r} is an absolute path; name the checkpoint relative to ROOT, as the list does"
            )
        if ".." in Path(relative).parts:
            raise UnsafeError(
                f"{relative!r} leaves ROOT through '..'; name the checkpoint relative to ROOT, as the list does"
            )
        try:
            real = Path(os.path.realpath(self.root / relative))
        except (OSError, UnicodeEncodeError):  # a lone surrogate
            raise MissingFileError(f"{relative!r} is not a valid file name; pick one from the list") from None
        if not real.is_relative_to(self.root):
            raise UnsafeError(
                f"{relative!r} is a link that leaves ROOT; refused. Serve the folder it points to instead"
            )
        if not os.path.lexists(real):
            raise MissingFileError(
                f"{relative!r} does not exist under ROOT; it may have been deleted. Refresh the list"
            )
        return real

    def show(self, path: str | os.PathLike[str]) -> str:
        """Return a real path inside ROOT as the page shows it: relative, with forward slashes."""
        return Path(path).relative_to(self.root).as_posix()


def relative_words(text: str, spelled: Callable[[str], str] = str) -> str:
    """Make the paths in a message relative to ROOT, whose location must not appear on the page.

    Args:
        spelled: how the text encodes a path: ``html.escape`` for a page.
    """
    for root in map(spelled, sorted(_roots, key=len, reverse=True)):
        if root in text:
            text = re.sub(re.escape(root) + r"(/|(?![\w.-]))", lambda found: "" if found[1] else "ROOT", text)
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
