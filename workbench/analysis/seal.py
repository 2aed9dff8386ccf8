"""Check a finished checkpoint and write its manifest, for trainers whose saves cannot be changed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

from workbench.analysis.manifest import computed, load
from workbench.analysis.manifest_entries import Manifest
from workbench.analysis.manifest_file import save
from workbench.analysis.verify import verify
from workbench.checkpoint import Checkpoint
from workbench.checkpoint import open as open_checkpoint
from workbench.core.executors import using
from workbench.core.remote.url import with_options
from workbench.core.scan import Progress, part_of
from workbench.core.words import plural
from workbench.errors import CorruptError, WorkbenchError

NAMED = 3  #: findings in an error


def seal(
    path: str | os.PathLike[str] | Checkpoint,
    *,
    deep: bool = True,
    inside: bool | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
    executor: Executor | None = None,
) -> Manifest:
    """Verify a checkpoint, and write its manifest if it is intact.

    Call it once, on one rank, when the save is complete: in Megatron's ``add_finalize_fn``, after DeepSpeed's
    ``save_checkpoint``, after ``torch.save`` or a Hugging Face save. ``wb.dcp.Writer`` creates the same manifest while
    it writes.

    If the checkpoint already has a manifest, ``deep`` compares every byte with it, so sealing again never hides a
    change. To replace the manifest of a checkpoint that was changed on purpose, use ``workbench manifest write``.

    Args:
        path: the checkpoint or its path, or a URL.
        deep: verify every byte first; otherwise only the structure.
        inside: store the manifest in the checkpoint's folder (the default for folders) or next to the checkpoint.
        threads: number of worker threads.
        progress: called with the fraction done; raise to cancel, which leaves no manifest.
        storage_options: for a URL, as in ``wb.open``.
        executor: a ``concurrent.futures.Executor`` whose workers do the reading, as in ``wb.verify``.

    Raises:
        CorruptError: the checks found an error; the message names the first ones. Nothing was written.
        OpenError: the checkpoint cannot be opened, or changed in the meantime.
        UsageError, WriteError: the manifest cannot be written where it belongs.
    """
    with using(executor), with_options(storage_options, path):
        ckpt = path if isinstance(path, Checkpoint) else open_checkpoint(path, cache=False)
        return _sealed(ckpt, deep, inside, threads, progress)


def _sealed(
    ckpt: Checkpoint, deep: bool, inside: bool | None, threads: int | None, progress: Progress | None
) -> Manifest:
    report = verify(ckpt, deep, threads=threads, progress=part_of(progress, 0.0, 0.5))
    if wrong := [one for one in report if one.severity == "error"]:
        more = f"; … {len(wrong) - NAMED:,} more" if len(wrong) > NAMED else ""
        words = "; ".join(f"{one.rule}: {one.where}: {one.message}" for one in wrong[:NAMED])
        found = f"{plural(len(wrong), 'error')} {'was' if len(wrong) == 1 else 'were'} found"
        raise CorruptError(f"{ckpt.path!r} is not sealed, {found}: {words}{more}")
    folder = ckpt.place.file is None
    made = computed(
        ckpt, inside=folder if inside is None else inside, threads=threads, progress=part_of(progress, 0.5, 0.5)
    )
    try:
        known = dict(load(ckpt.place).save)  # how wb.dcp.Writer saved it
    except WorkbenchError:
        known = {}
    record = known | {
        "sealed": True,
        "deep": deep,
        "checked": dict(report.checked),
        "not_checked": dict(report.not_checked),
    }
    manifest = replace(made, save=record)
    assert manifest.path is not None
    save(manifest, manifest.path)
    return manifest
