"""``workbench diff``: differences between two checkpoints; exit code 0 none, 1 some, 3 cannot read."""

from __future__ import annotations

import argparse

from workbench.analysis.diff import diff as compute
from workbench.cli.common import narrowed, no_match, note, open_as, print_json, say
from workbench.cli.workers import workers
from workbench.core.remote.url import shown
from workbench.errors import UsageError
from workbench.views.diff import SHOWN, diff_lines, tensor_text
from workbench.views.progress import progress_bar

CANNOT_READ = 3


def diff(options: argparse.Namespace) -> int:
    """Compare two checkpoints and print the differences, with the older step first.

    Options: ``a b pattern role no_values evidence all threads json detail replicas`` and the common ones.
    """
    whole = [open_as(options, path) for path in (options.a, options.b)]
    a, b = (narrowed(ckpt, options) for ckpt in whole)
    lacking = [no_match(ckpt, options) for ckpt, found in zip(whole, (a, b), strict=True) if not len(found)]
    if options.pattern and len(lacking) == len(whole):
        patterns = " or ".join(map(repr, options.pattern))
        raise UsageError(f"no tensor of either checkpoint matches {patterns}; `workbench ls` lists their names")
    for sentence in lacking if options.pattern else ():
        note(sentence)
    replicas = tuple(options.replicas or (0, 0))
    if a.step is not None and b.step is not None and a.step > b.step:
        note(f"a is {shown(options.b)!r} (step {b.step:,}), the older of the two: changes are shown from old to new")
        a, b, replicas = b, a, replicas[::-1]
    with workers(options) as executor, progress_bar("diff") as progress:
        found = compute(
            a,
            b,
            values=not options.no_values,
            evidence=options.evidence,
            replicas=replicas,
            threads=options.threads,
            progress=progress,
            executor=executor,
        )
    if options.json and options.detail is not None:
        print_json(found.tensor(options.detail).to_dict(detail=True))
    elif options.json:
        print_json(found.to_dict())
    elif options.detail is not None:
        say(tensor_text(found.tensor(options.detail)))
    else:
        say("\n".join(diff_lines(found, None if options.all else SHOWN)))
    if any(row.status == "unread" for row in found.rows):
        note("some tensors could not be read; the results cover only the others")
        return CANNOT_READ
    return found.exit_code
