"""``workbench manifest write|check|diff``: digests of every byte, for later comparison.

::

    workbench manifest write step-4000 [--output FILE | --inside]   writes step-4000.manifest.json next to it
    workbench manifest check step-4000 [MANIFEST]               0 unchanged · 1 a file was added · 2 bytes differ
    workbench manifest diff  BEFORE AFTER                       0 same tensors · 1 different; no checkpoint is read
"""

from __future__ import annotations

import argparse
import os

from workbench.analysis.manifest import computed, find, load, write
from workbench.analysis.manifest_check import check
from workbench.analysis.manifest_diff import ManifestDiff, compare
from workbench.analysis.manifest_entries import Manifest
from workbench.analysis.manifest_file import read
from workbench.cli.common import open_as, print_json, print_result, say
from workbench.cli.workers import check_pins, run_part, workers
from workbench.core.executors import using
from workbench.core.remote.url import shown
from workbench.core.words import plural
from workbench.errors import MissingFileError, UsageError, WorkbenchError
from workbench.views import units
from workbench.views.lines import room
from workbench.views.names import safe, shorten
from workbench.views.progress import progress_bar
from workbench.views.report import report_text

SHOWN = 20  #: names shown of each kind
_TAKES = {"write": (1, 1), "check": (1, 2), "diff": (2, 2)}


def manifest(options: argparse.Namespace) -> int:
    """Run the chosen action and return the exit code."""
    least, most = _TAKES[options.action]
    if not least <= len(options.paths) <= most:
        raise UsageError(f"manifest {options.action} takes {' or '.join(map(str, sorted({least, most})))} paths")
    if options.part is not None and options.action != "write":
        raise UsageError("--part is for manifest write")
    return {"write": _write, "check": _check, "diff": _diff}[options.action](options)


def _write(options: argparse.Namespace) -> int:
    ckpt = open_as(options, options.paths[0])
    title, how = f"manifest {os.path.basename(ckpt.path)}", {"inside": options.inside, "threads": options.threads}
    if options.part is not None:
        with progress_bar(title) as progress:
            return run_part(options, ckpt, lambda: computed(ckpt, options.output, progress=progress, **how))
    check_pins(options, ckpt)
    with workers(options) as executor, progress_bar(title) as progress:
        made = write(ckpt, options.output, progress=progress, executor=executor, **how)
    digests = sum(len(entry.digests) for entry in made.files.values())
    lost = sum(entry.fingerprint is None for entry in made.tensors.values())
    if options.json:
        print_json(
            {
                "manifest": made.path,
                "files": len(made.files),
                "nbytes": made.nbytes,
                "tensors": len(made.tensors),
                "without_fingerprint": lost,
                "digests": digests,
                "left_out": dict(made.left_out),
            }
        )
        return 0
    say(f"{safe(str(made.path))}")
    say(
        f"  {plural(len(made.files), 'file')}, {units.nbytes(made.nbytes)}, {plural(digests, 'digest')}; "
        f"{plural(len(made.tensors), 'tensor')} with fingerprints" + (f", {lost:,} without" if lost else "")
    )
    for name, why in list(made.left_out.items())[:SHOWN]:
        say(shorten(f"  left out: {safe(name)}: {safe(why)}", room()))
    return 0


def _check(options: argparse.Namespace) -> int:
    path = options.paths[0]
    if len(options.paths) > 1:
        given = load(options.paths[1])
    else:
        path, given = _with_manifest(options, path)
    title = f"check {os.path.basename(os.path.abspath(shown(path)))}"
    with workers(options) as executor, using(executor), progress_bar(title) as progress:
        report = check(path, given, threads=options.threads, progress=progress)
    print_result(options, report, report_text)
    return report.exit_code


def _diff(options: argparse.Namespace) -> int:
    first, second = load(options.paths[0]), load(options.paths[1])
    found = compare(first, second)
    if options.json:
        print_json(found.to_dict())
    else:
        say(shorten(f"{safe(first.name)} → {safe(second.name)}: {_headline(found)}", room()))
        for kind, names in _rows(found):
            for name in names[:SHOWN]:
                say(shorten(f"  {kind:8} {name}", room()))
            if len(names) > SHOWN:
                say(f"  {kind:8} … {len(names) - SHOWN:,} more")
    return 0 if found.same else 1


def _with_manifest(options: argparse.Namespace, path: str) -> tuple[str, Manifest]:
    """Return a checkpoint's path and its manifest; for a run's folder, those of the step that would be opened."""
    try:
        return path, read(find(path))
    except MissingFileError as error:
        try:
            step = open_as(options, path).path
        except WorkbenchError:
            raise error from None
        if os.path.realpath(step) == os.path.realpath(path):
            raise
        return step, load(step)


def _headline(found: ManifestDiff) -> str:
    kinds = ("added", "removed", "changed", "renamed", "unknown")
    counts = [f"{len(getattr(found, kind)):,} {kind}" for kind in kinds if getattr(found, kind)]
    moved = f" ({len(found.moved):,} in other files)" if found.moved else ""
    return ", ".join([*counts, f"{plural(len(found.equal), 'tensor')} equal{moved}"])


def _rows(found: ManifestDiff) -> list[tuple[str, list[str]]]:
    rows = [(kind, [safe(key) for key in getattr(found, kind)]) for kind in ("changed", "added", "removed", "unknown")]
    return [*rows, ("renamed", [f"{safe(a)} → {safe(b)}" for a, b in found.renamed])]
