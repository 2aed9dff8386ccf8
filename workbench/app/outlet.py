"""Where the dashboard may write: a folder inside ROOT, and only if the server was started with that option.

::

    ROOT ┌ run/step-4/…               a checkpoint: nothing is ever written into it
         └ exports/  ◄── --allow-export exports
             └ llama-dcp/             a target: relative, no '..', no link, no hidden name; its folder exists
             The same rules apply to a dry run on a server that may not write: the command that it shows must be valid.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from workbench import formats
from workbench.app.jail import BucketJail, Jail
from workbench.core.place import Place
from workbench.errors import OpenError, UnsafeError, UsageError, WriteError
from workbench.runs import steps_beside
from workbench.views.names import safe


class Outlet:
    """The folder that exports go to.

    Attributes:
        jail: ROOT.
        folder: the real path of the folder, inside ROOT.
        open: whether anything may be written there.

    Raises:
        UsageError: not a folder, or one outside ROOT.
    """

    def __init__(self, jail: Jail, folder: str | os.PathLike[str] | None = None) -> None:
        self.jail, self.open = jail, folder is not None
        self.folder = Path() if isinstance(jail, BucketJail) and folder is None else jail.folder
        if folder is not None:
            self.folder = Path(os.path.realpath(jail.folder / os.path.expanduser(os.fspath(folder))))
            if not self.folder.is_dir() or not self.folder.is_relative_to(jail.folder):
                raise UsageError(
                    f"exports must go to an existing folder inside ROOT, but {os.fspath(folder)!r} is not one; create "
                    "it first, or omit it to allow any place under ROOT"
                )

    def resolve(self, relative: str, *, overwrite: bool = False) -> Path:
        """Return the real path of a target, which need not exist yet.

        Raises:
            UnsafeError: the path is absolute, contains ``..``, a NUL byte or a hidden name, a symbolic link leaves the
                folder, or the target is a link itself.
            WriteError: its folder does not exist or is part of a checkpoint, the target is not a checkpoint, or the
            name is not a valid file name.
        """
        parts = Path(relative).parts
        if not parts or "\0" in relative:
            raise UnsafeError(f"{relative!r} does not name a target; enter a name, for example exports/model")
        if os.path.isabs(relative) or ".." in parts:
            raise UnsafeError(f"target {relative!r} is absolute or contains '..'; name it relative to {self}")
        if any(part.startswith((".", "~")) for part in parts):
            raise UnsafeError(f"target {relative!r} has a hidden name; the list would not show it. Choose another")
        try:
            os.fsencode(relative)  # is_symlink() considers a name that cannot be encoded to be free
            return self._inside(relative, parts, overwrite)
        except (OSError, UnicodeEncodeError) as error:  # too long, a lone surrogate
            reason = (isinstance(error, OSError) and error.strerror) or "it is not a valid file name"
            raise WriteError(f"target {relative!r} cannot be accessed: {reason}; choose another name") from None

    def shown(self, target: Path) -> str:
        """Return a target as the page shows it: relative to ROOT, or to where the command is run."""
        return target.as_posix() if isinstance(self.jail, BucketJail) else self.jail.show(target)

    def __str__(self) -> str:
        if isinstance(self.jail, BucketJail):
            return "the folder where the command is run"
        return "ROOT" if self.folder == self.jail.root else f"{self.shown(self.folder)!r} under ROOT"

    def _inside(self, relative: str, parts: Sequence[str], overwrite: bool) -> Path:
        folder = Path(os.path.realpath(self.folder / Path(*parts[:-1])))
        if not folder.is_relative_to(self.folder):
            raise UnsafeError(f"the folder of target {relative!r} is a link that leaves {self}; refused")
        if not folder.is_dir():
            raise WriteError(f"the folder of target {relative!r} does not exist; create it, or enter only a name")
        target = folder / parts[-1]
        if target.is_symlink():
            raise UnsafeError(f"target {relative!r} is a symbolic link; nothing is written through links")
        self._not_inside(target, relative)
        if overwrite and target.is_file() and not _is_checkpoint(target):
            raise WriteError(f"target {relative!r} is a file, not a checkpoint; it is not overwritten")
        return target

    def _not_inside(self, target: Path, relative: str) -> None:
        part, folder = target, target.parent
        while folder.is_relative_to(self.jail.folder):
            if _is_checkpoint(folder) and not _beside(part, folder):
                name = "ROOT" if folder == self.jail.root else repr(self.shown(folder))
                raise WriteError(f"target {relative!r} would be inside the checkpoint {name}; choose another place")
            part, folder = folder, folder.parent


def command(words: Sequence[str]) -> str:
    """Quote arguments as a line for a shell (bash, zsh), without control characters."""
    return " ".join(map(_quoted, words))


def _beside(target: Path, folder: Path) -> bool:
    """Return whether a new folder is beside loose files, which are a checkpoint, as other checkpoints already do."""
    try:
        known = formats.record(formats.detect(Place(str(folder))) or "")
    except OpenError:
        return False
    if not known.loose or target.suffix or known.owns(target.name):
        return False
    others = (one for one in folder.iterdir() if one.is_dir() and not known.owns(one.name))
    return any(map(_holds_checkpoint, others))


def _holds_checkpoint(folder: Path) -> bool:
    return _is_checkpoint(folder) or bool(steps_beside(Place(str(folder)), None))


def _is_checkpoint(path: Path) -> bool:
    try:
        return formats.detect(Place(str(path))) is not None
    except OpenError:  # a damaged checkpoint is still a checkpoint
        return True


def _quoted(word: str) -> str:
    if safe(word) == word:
        return shlex.quote(word)
    bytes_ = word.encode("utf-8", "surrogateescape")
    return "$'" + "".join(chr(b) if 32 <= b < 127 and b not in b"'\\" else f"\\x{b:02x}" for b in bytes_) + "'"
