"""Everything that is asked of a mutated checkpoint, and what must hold of the answers."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import workbench as wb
from tests.fuzz.mutate import Target
from workbench.analysis import manifest
from workbench.analysis.manifest_entries import Manifest
from workbench.analysis.report import Report
from workbench.analysis.verify import verify
from workbench.checkpoint import Checkpoint
from workbench.cli import main
from workbench.core.jsonable import jsonable
from workbench.errors import MissingExtraError, NotACheckpointError, WorkbenchError

READ = 64 << 20  #: bytes of tensors that are read of a case
TENSORS = 400
MESSAGE = 1500  #: characters of an error
SHARES = {"export": 0.15, "fit": 0.15, "commands": 0.15}  #: of the cases in which a step is taken; by default all
QUICK = {"doctor": 0.1, "pair": 0.08, "diff": 0.3, "stats": 0.5}  #: and these, in ``make test``


@dataclass
class Original:
    """A sample before it is mutated: opened, with a manifest and a digest of each of its files."""

    ckpt: Checkpoint
    manifest: Manifest
    digests: Mapping[str, bytes]
    data_files: frozenset[str]

    @classmethod
    def of(cls, path: Path, written: Path) -> Original:
        ckpt = wb.open(path, cache=False)
        made = manifest.write(ckpt, written)
        root = Path(ckpt.place.root)
        catalog = ckpt.catalog
        data = frozenset(catalog.files[number] for number in set(catalog.file.tolist()))
        return cls(ckpt, made, {name: _digest(root, name) for name in made.files}, data)


def _digest(root: Path, name: str) -> bytes:
    """Of a file's bytes; of nothing where there is no file, or one that a link leads to."""
    path = root / name
    inside = os.path.realpath(path) == os.path.join(os.path.realpath(root), name)
    if root.is_symlink() or not inside or not path.is_file():
        return b""
    return hashlib.blake2b(path.read_bytes(), digest_size=16).digest()


@dataclass
class Looked:
    """What came of a case: how each step ended, and what must not be."""

    steps: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    lost: bool = False  #: whether bytes of a file with tensors were lost, and nothing else was done


class Look:
    """The steps over one mutated checkpoint.

    Args:
        path: what is opened.
        base: the folder of the sample as it was, as ``target.root`` is that of the copy.
        original: the sample as it was.
        target: what was done to the copy.
        out: an empty folder for what is exported.
        spared: as :class:`tests.fuzz.samples.Sample` has it.
        quick: leave out most of what takes longest, drawn by ``chance``.
    """

    def __init__(
        self,
        path: Path,
        base: Path,
        original: Original,
        target: Target,
        out: Path,
        chance: Random,
        *,
        spared: tuple[str, ...],
        quick: bool,
    ) -> None:
        self.folder = target.root / Path(original.ckpt.place.root).relative_to(base)  # what the original's files lie in
        self.path, self.original, self.target, self.out, self.spared = path, original, target, out, spared
        self.threads = chance.choice((1, 1, 1, None))
        self.found = Looked()
        self.ckpt: Checkpoint | None = None
        rare = SHARES | QUICK if quick else SHARES
        drawn = {name: chance.random() for name in SHARES | QUICK}
        self.skipped = {name for name, share in rare.items() if drawn[name] > share}

    def run(self) -> Looked:
        """Every step; one that fails does not keep the others from being tried."""
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            self._step("open", self.open)
            if self.ckpt is not None:
                for name in ("show", "read", "objects", "stats", "diff", "layout", "fit", "export"):
                    if name not in self.skipped:
                        self._step(name, getattr(self, name))
            for name in ("discover", "verify", "against", "doctor", "pair", "commands"):
                if name not in self.skipped:
                    self._step(name, getattr(self, name))
        for one in {f"{one.category.__name__} {one.filename}:{one.lineno}: {one.message}" for one in told}:
            self.found.failures.append(f"warning: {one}")
        return self.found

    def _step(self, name: str, step: Callable[[], None]) -> None:
        try:
            step()
            self.found.steps[name] = "ok"
        except WorkbenchError as error:
            self.found.steps[name] = type(error).__name__
            said = str(error)
            if not said.isprintable() or len(said) > MESSAGE:
                self._failed(
                    name, f"the message of {type(error).__name__} has {len(said):,} characters: {said[:300]!a}"
                )
        except AssertionError as error:
            self._failed(name, f"{error}")
        except BaseException as error:
            frames = traceback.extract_tb(error.__traceback__)[-6:]
            where = " < ".join(f"{os.path.basename(frame.filename)}:{frame.lineno}" for frame in frames[::-1])
            self._failed(name, f"{type(error).__name__}: {str(error)[:200]!a} at {where}")

    def _failed(self, name: str, why: str) -> None:
        self.found.steps[name] = "failed"
        self.found.failures.append(f"{name}: {why}")

    # ---- the steps -----------------------------------------------------------------------------------------------

    def open(self) -> None:
        self.ckpt = wb.open(self.path, cache=False)

    def show(self) -> None:
        ckpt = self._opened()
        shown = [repr(ckpt), ckpt._repr_html_(), *ckpt.notes]
        ckpt.tensors, ckpt.chunks, ckpt.step, ckpt.mesh, ckpt.world_size, ckpt.views  # noqa: B018
        shown += [repr(ckpt[key]) for key in list(ckpt)[:3]]
        _encodable(shown)

    def read(self) -> None:
        ckpt, left, held = self._opened(), READ, None
        for key in [*ckpt, *ckpt.views][:TENSORS]:
            stored = ckpt[key]
            if stored.nbytes > left and not stored.inflated:
                continue
            try:
                whole = stored.torch()
                left -= whole.nbytes
                tensor = stored.decoded()  # itself, unless it is quantised
                whole = whole if tensor is stored else tensor.torch()
                assert tuple(whole.shape) == tensor.shape
                if tensor.ndim:
                    tensor[-1:]
            except WorkbenchError as error:
                held = error
        if held is not None:
            raise held

    def objects(self) -> None:
        ckpt = self._opened()
        for key in ckpt.objects:
            value = ckpt.objects[key]
            json.dumps(jsonable(value), allow_nan=False)
            _encodable([repr(value)])

    def stats(self) -> None:
        wb.stats(self._opened(), cache=False, threads=self.threads)

    def diff(self) -> None:
        made = wb.diff(self.original.ckpt, self._opened(), threads=self.threads)
        _encodable([str(made), repr(made), made._repr_html_()])

    def layout(self) -> None:
        made = wb.layout(self._opened())
        _encodable([repr(made), made._repr_html_()])

    def fit(self) -> None:
        _encodable([str(wb.plan_memory(self._opened(), gpus=8, memory_gb=1))])

    def export(self) -> None:
        report = wb.export(self._opened(), self.out / "exported", threads=self.threads)
        assert report.identical or not report.tensors, "the export is not what was read"
        assert len(wb.open(report.path, cache=False)) == len({one.name for one in report.tensors})
        shutil.rmtree(self.out / "exported")

    def discover(self) -> None:
        wb.discover(self.target.root)

    def verify(self) -> None:
        if not self.path.exists():
            return
        report = self._verified(deep=True)
        json.dumps(report.to_dict(), allow_nan=False)
        _encodable([repr(report), str(report), report._repr_html_()])
        lost = self.target.lost
        if lost is not None and os.path.relpath(lost[1], self.folder) in self.original.data_files:
            self.found.lost = True
            assert report.exit_code == 2 or lost[0] in self.spared, f"a loss is not an error: {report}"

    def against(self) -> None:
        """Against the manifest of the sample: no changed byte passes."""
        if not self.path.exists():
            return
        report = self._verified(manifest=self.original.manifest)
        json.dumps(report.to_dict(), allow_nan=False)
        if self.path.is_dir() and self.original.ckpt.place.file is not None:
            return  # a folder in the file's place is another checkpoint
        changed = [name for name, digest in self.original.digests.items() if _digest(self.folder, name) != digest]
        assert report.exit_code or not changed, f"{changed} changed, and the manifest says nothing"

    def doctor(self) -> None:
        _told(wb.doctor(self.path, threads=self.threads))

    def pair(self) -> None:
        _told(wb.doctor(self.original.ckpt, self.path, threads=self.threads))

    def commands(self) -> None:
        for command, asked in (
            ("ls", self.target.root),
            ("ls", self.path),
            ("objects", self.path),
            ("layout", self.path),
        ):
            told = io.StringIO()
            with redirect_stdout(told), redirect_stderr(told):
                code = main([command, str(asked)])
            assert code in (0, 1, 2, 3), f"`{command}` ended with {code}: {told.getvalue()[-300:]!a}"

    # ---- inside --------------------------------------------------------------------------------------------------

    def _verified(self, **how: Any) -> Report:
        try:
            return verify(self.path, threads=self.threads, **how)
        except (NotACheckpointError, MissingExtraError):
            raise
        except WorkbenchError as error:
            raise AssertionError(f"damage is raised, not reported: {type(error).__name__}: {error}") from error

    def _opened(self) -> Checkpoint:
        assert self.ckpt is not None
        return self.ckpt


def _told(diagnosis: Any) -> None:
    _encodable([str(diagnosis), repr(diagnosis), diagnosis._repr_html_()])
    json.dumps(diagnosis.to_dict(), allow_nan=False)


def _encodable(shown: list[str]) -> None:
    for text in shown:
        text.encode()
