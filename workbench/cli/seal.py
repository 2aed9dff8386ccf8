"""``workbench seal``: check a finished checkpoint and write its manifest."""

from __future__ import annotations

import argparse

from workbench.analysis.seal import seal as seal_checkpoint
from workbench.analysis.verify import verify
from workbench.cli.common import fail, open_as, print_json, say
from workbench.cli.workers import workers
from workbench.core.remote.url import shown
from workbench.core.words import plural
from workbench.errors import CorruptError, OpenError
from workbench.views import units
from workbench.views.names import safe
from workbench.views.progress import progress_bar

DAMAGED = 2  #: as verify's exit code


def seal(options: argparse.Namespace) -> int:
    """Seal a checkpoint and print where the manifest is; return 2 if it is damaged."""
    try:
        ckpt = open_as(options, options.path)
    except OpenError as error:
        if verify(options.path, format=options.format).exit_code < DAMAGED:
            raise
        return fail(options, f"{shown(options.path)!r} is not sealed: {error}", DAMAGED)
    try:
        with workers(options) as executor, progress_bar(f"seal {shown(options.path)}") as progress:
            made = seal_checkpoint(
                ckpt,
                deep=not options.quick,
                inside=False if options.beside else None,
                threads=options.threads,
                progress=progress,
                executor=executor,
            )
    except CorruptError as error:  # the checks found errors
        return fail(options, str(error), DAMAGED)
    if options.json:
        print_json(
            {"manifest": made.path, "files": len(made.files), "nbytes": made.nbytes, "tensors": len(made.tensors)}
        )
        return 0
    say(f"{safe(str(made.path))}")
    tensors = plural(len(made.tensors), "tensor")
    say(f"  sealed: {plural(len(made.files), 'file')}, {units.nbytes(made.nbytes)}, {tensors}")
    return 0
