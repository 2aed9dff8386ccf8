"""``workbench seal``: check a finished checkpoint and write its manifest."""

from __future__ import annotations

import argparse
import sys

from workbench.analysis.seal import seal as seal_checkpoint
from workbench.cli.common import open_as, print_json, say
from workbench.cli.workers import workers
from workbench.core.remote.url import shown
from workbench.core.words import plural
from workbench.errors import CorruptError
from workbench.views import units
from workbench.views.names import safe
from workbench.views.progress import progress_bar


def seal(options: argparse.Namespace) -> int:
    """Seal a checkpoint and print where the manifest is."""
    ckpt = open_as(options, options.path)
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
    except CorruptError as error:  # it was opened: the checks found errors, as verify's exit code states
        print(f"workbench: {safe(error)}", file=sys.stderr)
        return 2
    if options.json:
        print_json(
            {"manifest": made.path, "files": len(made.files), "nbytes": made.nbytes, "tensors": len(made.tensors)}
        )
        return 0
    say(f"{safe(str(made.path))}")
    tensors = plural(len(made.tensors), "tensor")
    say(f"  sealed: {plural(len(made.files), 'file')}, {units.nbytes(made.nbytes)}, {tensors}")
    return 0
