"""The parameters behind an optimizer's integer ids, if they are certain.

::

    param_groups  [{params: [0, 1, 2]}, {params: [3, 4]}]        state  {0: {exp_avg (1000, 64)}, 1: … (64, 64), …}
    model         embed.weight (1000, 64)   wq.weight (64, 64)   norm.weight (64,)   wq.bias (64,)   lm_head …

    one group, or decay and no decay, in the model's order: counts and every shape agree  →  0 = embed.weight, …

torch numbers parameters through the groups and stores no names unless it is given some. A wrong match would show one
parameter's moments as another's, so uncertain ids remain numbers.

Sources: torch 2.13 ``torch/optim/optimizer.py``; transformers 5.23 (``get_decay_parameter_names``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from workbench.names.roles import adapter_of

#: State that has its parameter's shape.
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg", "sum", "exp_inf", "master_param")
_NUMBERED = "are numbered, and it is not certain which parameters these are"
#: transformers' Trainer puts these into the group without weight decay (``get_decay_parameter_names``).
_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def join_param_groups(
    param_groups: Sequence[Mapping[str, Any]],
    state_shapes: Mapping[int, tuple[int, ...]],
    names: Sequence[str],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    ordered: bool,
) -> dict[int, str] | None:
    """Map an optimizer's integer ids to parameters if that is certain; never guess.

    An optimizer numbers its parameters through its groups. The following are certain, in this order:

    1. groups with ``param_names`` (torch 2.6 and newer, if the optimizer was given named parameters);
    2. with ``ordered`` names (the model's own order, in which torch stores a ``state_dict``): one group, or the two of
       transformers' Trainer (decay, no decay), whose counts and shapes all agree in that order. If all shapes are
       equal this would prove nothing, so it counts only with two shapes or more;
    3. otherwise, if the shapes are equal as a multiset: parameters whose shape is unique.

    If there are fewer ids than names, they are those of the adapters, or of the model without them.

    Args:
        param_groups: as stored; each with ``params``, a list of ids.
        state_shapes: shape of the moments of each id, elements.
        names, shapes: the model's parameters; of tied ones only the first.

    Returns:
        the ids that are certain, or ``None`` if none is.
    """
    listed = [group.get("params") for group in param_groups]
    groups = [list(numbers) if isinstance(numbers, (list, tuple)) else [] for numbers in listed]
    ids = [number for group in groups for number in group]
    if not ids or any(type(number) is not int for number in ids) or len(set(ids)) != len(ids):
        return None
    if all(_named(group) for group in param_groups):
        named = [str(name) for group in param_groups for name in group["param_names"]]
        return dict(zip(ids, named, strict=True)) if len(set(named)) == len(named) else None
    adapters = [name for name in names if adapter_of(name)]  # these are trained, and the base under them is not
    if len(ids) != len(names):
        names = adapters if len(ids) == len(adapters) else [name for name in names if name not in adapters]
    if len(ids) != len(names):
        return None
    if ordered and len({shapes[name] for name in names}) > 1:
        found = [
            joined
            for split in _splits(names, shapes, len(groups))
            if (joined := _fit(groups, split, state_shapes, shapes))
        ]
        if found and all(joined == found[0] for joined in found):
            return found[0]
    return _unique(ids, state_shapes, names, shapes)


def name_numbered(
    fqns: list[str | None],
    numbers: Mapping[int, Any],
    moments: Mapping[int, tuple[int, ...]],
    groups: Sequence[Mapping[str, Any]],
    params: Mapping[str, tuple[int, ...]],
    *,
    ordered: bool,
    optimizer: str,
) -> list[str]:
    """Fill in the parameters of an optimizer's numbered tensors if they are certain; return a note on the others.

    Args:
        fqns: of a checkpoint's tensors; changed in place.
        numbers: position of a tensor → its parameter's id.
        moments: shape of each id's moments, see :data:`MOMENTS`.
        groups, ordered: as for :func:`join_param_groups`.
        params: shapes of the model's parameters; of tied ones only the first.
        optimizer: its name in the note.
    """
    joined = join_param_groups(groups, moments, list(params), params, ordered=ordered) or {}
    for position, number in numbers.items():
        fqns[position] = joined.get(number)
    lost = len(set(numbers.values()) - set(joined))
    return [uncertain(optimizer, lost)] if lost else []


def uncertain(optimizer: str, count: int) -> str:
    """Return the note on numbered parameters that could not be matched to a name."""
    return f"{optimizer or 'the optimizer'}: {count} of its parameters {_NUMBERED}"


def is_uncertain(note: str) -> bool:
    """Return whether a note comes from :func:`uncertain`; a layout that knows the model decides again."""
    return note.endswith(_NUMBERED)


def _named(group: Mapping[str, Any]) -> bool:
    names = group.get("param_names")
    return isinstance(names, (list, tuple)) and len(names) == len(group["params"])


def _splits(
    names: Sequence[str], shapes: Mapping[str, tuple[int, ...]], groups: int
) -> Iterator[tuple[list[str], ...]]:
    """Yield the usual ways to split ordered names into groups."""
    if groups == 1:
        yield (list(names),)
    elif groups == 2:
        for rule in (lambda name: not _NO_DECAY.search(name.lower()), lambda name: len(shapes[name]) > 1):
            first, second = [n for n in names if rule(n)], [n for n in names if not rule(n)]
            yield first, second
            yield second, first


def _fit(
    groups: Sequence[Sequence[int]],
    split: Sequence[Sequence[str]],
    state_shapes: Mapping[int, tuple[int, ...]],
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[int, str] | None:
    joined: dict[int, str] = {}
    for ids, names in zip(groups, split, strict=True):
        if len(ids) != len(names):
            return None
        pairs = list(zip(ids, names, strict=True))
        if any(state_shapes.get(number, shapes[name]) != shapes[name] for number, name in pairs):
            return None
        joined |= dict(pairs)
    return joined


def _unique(
    ids: Sequence[int],
    state_shapes: Mapping[int, tuple[int, ...]],
    names: Sequence[str],
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[int, str] | None:
    if any(number not in state_shapes for number in ids):
        return None
    mine, theirs = Counter(state_shapes[number] for number in ids), Counter(shapes[name] for name in names)
    if mine != theirs:
        return None
    alone = {shapes[name]: name for name in names if theirs[shapes[name]] == 1}
    return {number: alone[state_shapes[number]] for number in ids if state_shapes[number] in alone} or None
