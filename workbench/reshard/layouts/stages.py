"""Pipeline stages: which of them hold a parameter.

::

    stage 0   embedding   layers 0 1 2       10 layers on 4 stages: 3 3 2 2, or as given
    stage 1               layers 3 4 5
    stage 2               layers 6 7
    stage 3               layers 8 9         final norm, output layer
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import accumulate

import numpy as np

from workbench.errors import UsageError
from workbench.reshard.layouts import kinds

__all__ = ["Stages"]


class Stages:
    """The stages of one model."""

    def __init__(
        self, fqns: Collection[str], count: int, layers: tuple[int, ...] | None, note: Callable[[str, str], None]
    ) -> None:
        """Number the layers.

        Args:
            fqns: all parameters.
            count: how many stages.
            layers: of each stage; evenly by default, the first stages with one more.
            note: is told what is doubtful, and of which parameter.

        Raises:
            UsageError: ``layers`` are not the model's, or no parameter is in a numbered layer.
        """
        self.last, self.note = count - 1, note
        found: dict[str, int] = {}
        for fqn in fqns:
            if layer := kinds.layer_of(fqn):
                found[layer[0]] = max(found.get(layer[0], 0), layer[1])
        if not found:
            raise UsageError(f"no parameter has a layer's number in its name; pp={count} needs a Rule for 'pp'")
        self.stack = max(found, key=lambda stack: found[stack])  # beside it: encoders, multi-token prediction
        total = found[self.stack] + 1
        sizes = layers or tuple(total // count + (stage < total % count) for stage in range(count))
        if len(sizes) != count or sum(sizes) != total or min(sizes) < 0:
            raise UsageError(f"layers={sizes} are not the {total} layers of {self.stack!r} on {count} stages")
        self.ends = np.array(list(accumulate(sizes)))
        outputs = [fqn for fqn in fqns if _is_vocab(fqn) and kinds.end_of(fqn) == "last"]
        self.tied = not outputs

    def of(self, fqn: str) -> tuple[int, ...] | None:
        """Stages that hold a parameter, ``None`` for all."""
        if layer := kinds.layer_of(fqn):
            if layer[0] == self.stack:
                return (int(np.searchsorted(self.ends, layer[1], side="right")),)
            stage = self.last if "mtp" in layer[0] else 0
            self.note(f"in layers beside {self.stack!r}, put on stage {stage}", fqn)
            return (stage,)
        end = kinds.end_of(fqn)
        if end is None:
            self.note("in no layer and at no end of the model, put on every stage", fqn)
            return None
        if end == "first" and self.tied and _is_vocab(fqn):
            self.note("no output layer is stored: the embedding is on the first and the last stage", fqn)
            return (0, self.last)
        return (0,) if end == "first" else (self.last,)


def _is_vocab(fqn: str) -> bool:
    kind = kinds.kind_of(fqn)
    return kind is not None and kind[0] == "vocab"
