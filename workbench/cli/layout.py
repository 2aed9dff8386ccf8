"""``workbench layout``: the contents of each rank, and whether the model would fit other GPUs.

Exit code 2 for holes and overlaps; with ``--fit``, 1 if no layout fits.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from workbench.analysis.layout import Layout
from workbench.analysis.layout import layout as compute
from workbench.analysis.phases import phases as recorded
from workbench.cli.common import narrow, open_as, print_json, print_result, say
from workbench.errors import UsageError
from workbench.views.layout import ROWS, holder_text, layout_lines, tensor_lines
from workbench.views.phases import phases_text

if TYPE_CHECKING:
    import pandas as pd

BROKEN = 2
#: Options of a memory budget, and their defaults.
FITTED = dict.fromkeys(("tp", "pp", "dp", "ep", "stage")) | {
    "weights": "stored",
    "grads": "weights",
    "master": "auto",
    "moments": "fp32",
    "inference": False,
    "reserve": 0.0,
}
DIGITS = 10  #: maximum length of a GPU count or a rank number


def layout(options: argparse.Namespace) -> int:
    """Print a layout, one of its tensors or ranks, or a memory budget.

    Options: ``path pattern role tensor rank phases all fit tp pp dp ep stage weights grads master moments inference
    reserve`` and the common ones.
    """
    _check_options(options)
    if options.fit is not None:
        return _fit(options)
    if options.phases:
        return _phases(options)
    found = compute(narrow(open_as(options, options.path), options))
    if options.tensor is not None:
        _tensor(found, options)
    elif options.rank is not None:
        _rank(found, options)
    elif options.json:
        print_json(found.to_dict())
    else:
        say("\n".join(layout_lines(found, None if options.all else ROWS)))
    covered = found.covered
    return BROKEN if covered.holes or covered.overlaps or covered.tangled else 0


def _check_options(options: argparse.Namespace) -> None:
    """Refuse options that would have no effect."""
    views = [name for name in ("fit", "phases", "tensor", "rank") if getattr(options, name)]
    if len(views) > 1:
        raise UsageError(f"--{views[0]} and --{views[1]} show different things; give one of them")
    if options.fit is None:
        given = [name for name, default in FITTED.items() if getattr(options, name) != default]
        if given:
            raise UsageError(f"--{given[0]} is for --fit GPUS GB; leave it out, or give both")
    if views and views[0] in ("fit", "phases") and (options.pattern or options.role is not None):
        raise UsageError(f"--{views[0]} is about the whole checkpoint: leave out patterns and --role")


def _tensor(found: Layout, options: argparse.Namespace) -> None:
    if not options.json:
        say("\n".join(tensor_lines(found, options.tensor)))
        return
    placed = found.placed(options.tensor)
    print_json(
        {
            "key": options.tensor,
            "placement": str(placed),
            "status": placed.status,
            "kind": placed.kind,
            "why": placed.why,
            "torch": placed.torch,
            "pieces": _records(found.pieces(options.tensor)),
        }
    )


def _rank(found: Layout, options: argparse.Namespace) -> None:
    number = int(options.rank) if options.rank.isdecimal() and len(options.rank) < DIGITS else options.rank
    view = found.rank(number)
    if options.json:
        print_json(
            {
                "label": view.label,
                "rank": view.rank,
                "coordinates": dict(view.coordinates),
                "peers": dict(view.peers),
                "nbytes": view.nbytes,
                "pieces": _records(view.pieces),
            }
        )
    else:
        say(holder_text(view, None if options.all else ROWS))


def _phases(options: argparse.Namespace) -> int:
    found = recorded(open_as(options, options.path).place)
    print_result(options, found, lambda one: phases_text(one, None if options.all else ROWS))
    return 0


def _fit(options: argparse.Namespace) -> int:
    from workbench.memory import Precision, plan_memory

    gpus, memory = options.fit
    if not (gpus.isdecimal() and len(gpus) < DIGITS):
        raise UsageError(f"--fit takes the number of GPUs and the GB of each; {gpus!r} is not a valid number of GPUs")
    try:
        size = float(memory)
    except ValueError:
        raise UsageError(f"--fit takes the number of GPUs and the GB of each; {memory!r} is not a number") from None
    precision = (
        Precision.inference(options.weights)
        if options.inference
        else Precision(options.weights, options.grads, options.master, options.moments)
    )
    found = plan_memory(
        open_as(options, options.path),
        int(gpus),
        size,
        tp=options.tp,
        pp=options.pp,
        dp=options.dp,
        ep=options.ep,
        stage=options.stage,
        precision=precision,
        reserve_gb=options.reserve,
    )
    print_result(options, found, repr)
    return 0 if found.fits else 1


def _records(frame: pd.DataFrame) -> Any:
    import json

    return json.loads(frame.to_json(orient="records"))
