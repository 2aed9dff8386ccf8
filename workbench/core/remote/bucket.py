"""A folder of a store as the files of a place: one listing becomes a tree of names that answers every question.

::

    list s3://bucket/run/    →    run ─┬ latest_checkpointed_iteration.txt
                                       ├ step-100 ─┬ .metadata
                                       │           └ __0_0.distcp
                                       └ step-200 …          exists, stat, files, folders: no further request

A folder of more than :data:`MANY` objects, or of many folders on a web server, is listed level by level instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any

import numpy as np

from workbench.core.remote.connection import Connection
from workbench.core.remote.objects import TooManyFolders
from workbench.core.remote.ranged import BLOCK, RangedSource
from workbench.core.remote.requests import together, unless_unanswered
from workbench.core.remote.url import Location, current_options, parse
from workbench.core.source import FileStat, Source
from workbench.errors import MissingFileError, NotACheckpointError, UnsafeError

MANY = 20_000  #: objects up to which a folder is listed with everything below it
AHEAD = 512  #: files up to which a checkpoint's ends are fetched in advance
WHOLE = 256 << 10  #: bytes up to which a file is fetched whole
MARKER = 16 << 10  #: … if there are more files
BY_HEADER = (".safetensors",)  #: ends of names of files whose directory is at their beginning
INDEX = ".index.json"  #: end of the name of a file that names the files beside it
BY_INDEX = (".distcp",)  #: … and in another file


class Tree:
    """Names below a folder: its files, and its folders as trees.

    Attributes:
        files: identity by name; ``None`` until it is requested, or if the object was deleted before.
        listed: whether the names are known; if not, the folder is listed when one of them is needed.
    """

    def __init__(self, files: Mapping[str, FileStat | None] | None = None, *, listed: bool = True) -> None:
        self.files: dict[str, FileStat | None] = dict(files or {})
        self.folders: dict[str, Tree] = {}
        self.listed = listed

    def add(self, path: str, stat: FileStat | None) -> None:
        """Add a file; names that could lead out of a folder (``..``, empty) are left out, as dangling links are."""
        *folders, name = path.split("/")
        if any(part in ("", ".", "..") or "\0" in part for part in (*folders, name)):
            return
        tree = self
        for folder in folders:
            tree = tree.folders.setdefault(folder, Tree())
        tree.files[name] = stat

    def walk(self, above: str = "") -> Iterator[tuple[Tree, str, str]]:
        """Yield the folder, name and path of each file, those of this folder first."""
        yield from ((self, name, above + name) for name in self.files)
        for name, tree in self.folders.items():
            yield from tree.walk(f"{above}{name}/")


class Bucket:
    """A folder of objects, or one object: the files of a :class:`~workbench.core.place.Place`."""

    at_once = 16  #: reads that wait for the store at the same time; each may make several requests

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        at = parsed = parse(url)
        connection = Connection(at, current_options() if options is None else options)
        at = connection.at = at.public
        tree = Tree(listed=False)
        self._become(connection, at, tree, None)
        # file or folder: both requests run at the same time; but a server may answer the second with the whole file
        file = parsed.web and (parsed.query or "." in at.name)
        listing = None if file else connection.begin(self._list, tree, at)
        # a name with a dot is mostly a file's; servers send no part of a folder's page
        stat = connection.ask(connection.look, at.key, BLOCK if "." in at.name else 0) if at.key else None
        if stat is not None:
            self._become(connection, at.above(), Tree({at.name: stat}), at.name)
            return
        (listing or connection.begin(self._list, tree, at)).wanted()
        if not (tree.files or tree.folders):
            if getattr(connection.objects, "pages", False):
                raise NotACheckpointError(
                    f"{at.shown!r}: the server sent an HTML page without links to files (a login page?); check the "
                    "credentials, or give the URL of a file"
                )
            listed = ", or is a folder that the server does not list: give the URL of a file" if at.web else ""
            raise NotACheckpointError(f"{at.shown!r} does not exist{listed}")

    def _become(self, connection: Connection, at: Location, tree: Tree, file: str | None) -> None:
        self._connection, self._at, self._tree, self.file = connection, at, tree, file
        self.root = at.shown
        self.shown = self.root if file is None else at.at(file).shown
        self._holder: tuple[Bucket, str] | None = None  # the place it was reached from, and the folder inside that

    def _with(self, connection: Connection, at: Location, tree: Tree, file: str | None = None) -> Bucket:
        made = Bucket.__new__(Bucket)
        made._become(connection, at, tree, file)
        return made

    def __getstate__(self) -> tuple[Connection, Location, str | None]:
        return self._connection, self._at, self.file  # names and identities are requested again

    def __setstate__(self, state: tuple[Connection, Location, str | None]) -> None:
        connection, at, file = state
        self._become(connection, at, _unseen(file), file)

    @property
    def name(self) -> str:
        return self._at.name if self.file is None else self.file

    @property
    def traffic(self) -> dict[str, int] | None:
        return self._connection.traffic.__getstate__()

    def listing(self) -> tuple[dict[str, FileStat], list[str]]:
        tree = self._folder([])
        assert tree is not None
        unknown = [name for name, stat in tree.files.items() if stat is None]
        if unknown:  # of a server that lists names only
            tree.files |= dict(zip(unknown, together(self._head, unknown), strict=True))
        return {name: stat for name, stat in tree.files.items() if stat is not None}, list(tree.folders)

    def sub(self, relative: str) -> Bucket:
        *folders, name = self._parts(relative)
        tree = self._folder(folders)
        if tree is not None and name in tree.files:
            above = self._at.at("/".join(folders)) if folders else self._at
            found = self._with(self._connection, above, tree, name)
        elif tree is not None and name in tree.folders:
            found = self._with(self._connection, self._at.at(relative), tree.folders[name])
        else:
            raise NotACheckpointError(f"{self._at.at(relative).shown!r} does not exist")
        found._holder = self, "/".join(folders)
        return found

    def exists(self, relative: str) -> bool:
        try:
            *folders, name = self._parts(relative)
        except UnsafeError:
            return False
        tree = self._folder(folders)
        return tree is not None and (name in tree.files or name in tree.folders)

    def is_link(self, relative: str) -> bool:
        return False

    def stat(self, relative: str) -> FileStat:
        *folders, name = self._parts(relative)
        tree = self._folder(folders)
        if self.file is not None and self.file.endswith(INDEX) and tree is not None and name not in tree.files:
            tree.files[name] = None  # a file that an index names, beside it
        if tree is not None and name in tree.files:
            if tree.files[name] is None:
                tree.files[name] = self._connection.ask(self._head, relative)
            if (found := tree.files[name]) is not None:
                return found
        raise MissingFileError(f"file {relative!r} of {self.shown!r} is missing; restore it or save again")

    def now(self, relative: str) -> FileStat:
        return self.stat(relative)  # a request fails if the object was replaced meanwhile

    def source(self, relative: str) -> Source:
        return RangedSource(self._connection, self._at.at(relative).key, relative, self.stat(relative))

    def ahead(self) -> None:
        """Fetch, in one round, what a reader is about to examine: small files, and the ends of large ones.

        A safetensors file begins with its header, and a zip archive ends with its directory. Of many files (a run's
        steps), only the smallest are fetched: markers and trackers. Errors are left to the reads themselves, unless the
        store does not answer.
        """
        tree = self._folder([])
        assert tree is not None
        files = list(islice(tree.walk(), MANY))
        few = len(files) <= AHEAD
        unknown = [(tree, name, path) for tree, name, path in files if few and tree.files[name] is None]
        for (tree, name, _), stat in zip(unknown, together(lambda one: self._quietly(one[2]), unknown), strict=True):
            tree.files[name] = stat
        wanted = []
        for tree, name, path in files:
            size = 0 if (stat := tree.files[name]) is None else stat.size
            if 0 < size <= (WHOLE if few else MARKER):
                wanted.append((path, 0, size))
            elif size and few and not name.endswith(BY_INDEX):
                wanted += [(path, 0, BLOCK), (path, size - BLOCK, size)][: 1 if name.endswith(BY_HEADER) else 2]
        held = self._connection.blocks
        wanted = [one for one in wanted[: 2 * AHEAD] if held.find(self._at.at(one[0]).key, *one[1:]) is None]
        together(lambda one: self._fetch(*one), wanted)

    def uncached(self) -> AbstractContextManager[None]:
        return self._connection.uncached()

    def again(self) -> Bucket:
        """Return the same files, listed anew."""
        return self._with(self._connection.again(), self._at, _unseen(self.file), self.file)

    def above(self) -> Bucket | None:
        if self._holder is not None:  # its names are known
            holder, inner = self._holder
            return holder.sub(inner) if inner else holder
        if not self._at.key:
            return None
        folder = self._at if self.file is not None else self._at.above()
        return self._with(self._connection, folder, Tree(listed=False))

    def _quietly(self, relative: str) -> FileStat | None:
        with unless_unanswered():
            return self._head(relative)
        return None

    def _fetch(self, relative: str, start: int, stop: int) -> None:
        key = self._at.at(relative).key
        with unless_unanswered():
            data = self._connection.get(key, relative, start, stop, self.stat(relative))
            self._connection.blocks.keep(key, start, np.frombuffer(data, np.uint8))

    def _head(self, relative: str) -> FileStat | None:
        return self._connection.head(self._at.at(relative).key)

    def _folder(self, folders: list[str]) -> Tree | None:
        """Return the names in a folder inside, listed if not known yet; ``None`` if the folder does not exist."""
        tree, at = self._tree, self._at
        for folder in [*folders, None]:
            if not tree.listed:
                self._connection.ask(self._list, tree, at)
            if folder is None:
                return tree
            if folder not in tree.folders:
                return None
            tree, at = tree.folders[folder], at.at(folder)
        return tree

    def _list(self, tree: Tree, at: Location) -> None:
        objects, skip = self._connection.objects, len(at.key) + 1 if at.key else 0
        self._connection.traffic.count(requests=1)  # at least: stores list in pages, servers folder by folder
        try:
            found = list(islice(objects.walk(at.key), MANY + 1))
        except TooManyFolders:
            found = None
        if found is not None and len(found) <= MANY:
            for path, stat in found:
                tree.add(path[skip:], stat)
        else:
            files, folders = objects.listing(at.key)
            for name, stat in files.items():
                tree.add(name, stat)
            tree.folders |= {name: Tree(listed=False) for name in folders if name not in ("", ".", "..")}
        tree.listed = True

    def _parts(self, relative: str) -> list[str]:
        parts = relative.split("/")
        if "\0" in relative or any(part in ("", ".", "..") for part in parts):
            raise UnsafeError(f"path {relative!r} leaves the checkpoint {self.shown!r}; refused")
        return parts


def _unseen(file: str | None) -> Tree:
    return Tree(listed=False) if file is None else Tree({file: None})
