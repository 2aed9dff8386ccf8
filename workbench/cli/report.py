"""``workbench report``: write a run, a checkpoint, or the difference of two as one HTML file.

::

    workbench report RUN -o run.html             curves, jumps, diagnosis, layers, checkpoints
    workbench report CKPT -o ckpt.html           contents and a verification
    workbench report A B -o diff.html            the differences
    workbench report RUN --figure loss.svg       the curves alone: PNG, SVG or PDF
"""

from __future__ import annotations

import argparse
from html import escape

from workbench import formats
from workbench.analysis.run import Run, run
from workbench.checkpoint import Checkpoint
from workbench.cli.common import note, open_as, print_json
from workbench.core.place import Place
from workbench.core.scan import Progress
from workbench.errors import UsageError
from workbench.runs import steps_beside
from workbench.views.names import safe
from workbench.views.pages import page_of, page_path, write_page
from workbench.views.progress import progress_bar


def report(options: argparse.Namespace) -> int:
    """Write the file, and print a note with its path.

    Options: ``paths output figure logs deep threads`` and the common ones.
    """
    if options.output is None and options.figure is None:
        raise UsageError("give -o FILE.html, or --figure FILE.svg for the curves only")
    if len(options.paths) > 2:
        raise UsageError("give one path (a run or a checkpoint), or two checkpoints to compare")
    target = None if options.output is None else page_path(options.output, "-o")
    found = _run(options) if len(options.paths) == 1 else None
    if options.figure is not None:
        if found is None:
            raise UsageError("--figure draws the curves of a run; name a run's folder")
        found.plot().save(options.figure)
        note(f"wrote {options.figure!r}")
    if target is not None:
        with progress_bar("report") as progress:
            if found is not None:
                found.to_html(target, layers=True if options.deep else None, progress=progress)
            elif len(options.paths) == 2:
                write_page(_difference(options, progress), target)
            else:
                write_page(_checkpoint(options, progress), target)
        note(f"wrote {str(target)!r}")
    if options.json:
        print_json({"output": None if target is None else str(target), "figure": options.figure})
    return 0


def _run(options: argparse.Namespace) -> Run | None:
    """Return the run that the path names; ``None`` for a checkpoint."""
    place = Place(options.paths[0])
    found = formats.detect(place)
    alone = options.format is not None or (found is not None and len(steps_beside(place, found)) < 2)
    if options.logs is None and alone:
        return None
    return run(options.paths[0], options.logs)


def _checkpoint(options: argparse.Namespace, progress: Progress) -> str:
    from workbench.analysis.verify import verify
    from workbench.views.html import checkpoint_html
    from workbench.views.report import report_html

    ckpt = open_as(options, options.paths[0])
    checked = verify(ckpt, deep=options.deep, threads=options.threads, progress=progress)
    body = f"{checkpoint_html(ckpt)}<h2>Verification</h2>{report_html(checked)}"
    return page_of(_title(ckpt), body, {})


def _difference(options: argparse.Namespace, progress: Progress) -> str:
    from workbench.analysis.diff import diff
    from workbench.views.diff import diff_html

    a, b = (open_as(options, path) for path in options.paths)
    found = diff(a, b, threads=options.threads, progress=progress)
    sides = f"<p>a: <code>{escape(_title(a))}</code><br>b: <code>{escape(_title(b))}</code></p>"
    return page_of("Difference of two checkpoints", sides + diff_html(found), {})


def _title(ckpt: Checkpoint) -> str:
    return safe(str(ckpt.path))
