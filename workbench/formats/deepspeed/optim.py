"""One rank's ZeRO optimizer file: its flat tensors by state and group, located but not read.

::

    stages 1, 2   optimizer_state_dict                                    stage 3   optimizer_state_dict
      single_partition_of_fp32_groups   [flat, flat]      fp32              fp32_flat_groups   [flat, flat, flat]
      base_optimizer_state.state.0      exp_avg, …, step                    optimizer_state_dict.state.0   exp_avg, …
      group_paddings                    [0, 3]                              partition_count    2
      partition_count                   [2, 2]

Stages 1 and 2 strip the padding from ``fp32`` but not from the moments. ``BF16_Optimizer`` keeps both paddings; the
``elastic_checkpoint`` layout (a list for ``state``) strips both. Read from deepspeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.core.pickles.standins import Opaque, TensorRef
from workbench.core.words import plural
from workbench.errors import CorruptError, UnsupportedFormatError
from workbench.formats.deepspeed.files import Located, States, items

MASTER = "fp32"  #: our name of the flat master weights
MAX_RANKS = 1 << 16
_FLAT = {1: "single_partition_of_fp32_groups", 3: "fp32_flat_groups"}


@dataclass
class RankShard:
    """Contents of one rank's file.

    Attributes:
        stage3: whether each parameter is partitioned separately.
        flat: state (``fp32``, ``exp_avg`` …) → one flat tensor per group; ``None`` for a group without one.
        scalars: ``(group, state)`` → a tensor that is not a partition: ``step``.
        counts: number of ranks that share each group (stage 3: all).
        paddings: elements of padding in this rank's part of each group, if stored.
        aligned: elements of padding after each parameter of each group, if stored.
        order: parameter names of each group in ``param_slice_mappings``; never used as the order of the file.
        steps: integers that param groups store as ``step``.
        info: ``universal_checkpoint_info``, if stored.
        end: where the contents of the file end, if its format defines that.
    """

    file: str
    stage3: bool
    flat: dict[str, list[Located | None]] = field(default_factory=dict)
    scalars: dict[tuple[int, str], Located] = field(default_factory=dict)
    counts: list[int] = field(default_factory=list)
    paddings: list[int] | None = None
    aligned: list[list[int]] | None = None
    order: list[list[str]] | None = None
    steps: list[int] = field(default_factory=list)
    info: Any = None
    end: int | None = None

    @property
    def groups(self) -> int:
        """Number of flat groups."""
        return len(self.flat[MASTER])

    def length(self, group: int) -> int:
        """Return the elements of a group's longest flat tensor."""
        return max(part.shape[0] for parts in self.flat.values() if (part := parts[group]) is not None)

    def padding(self, group: int) -> int:
        """Return the elements of padding at the end of this rank's part of a group, 0 if not stored."""
        return self.paddings[group] if self.paddings else 0


def read_shard(states: States) -> RankShard:
    """Locate the flat tensors of an optimizer file.

    Raises:
        CorruptError: the file does not have DeepSpeed's structure; the message names the file and the entry.
        UnsupportedFormatError: the layout splits parameters in a way that the files do not describe.
    """
    whole = states.tree.get("optimizer_state_dict")
    if not isinstance(whole, Mapping):
        raise CorruptError(f"{states.file!r} has no optimizer_state_dict, so it is not a ZeRO optimizer file")
    stage = _number(whole.get("zero_stage"))
    stage3 = stage == 3 or (stage is None and _FLAT[3] in whole)
    parts = items(whole.get(_FLAT[3 if stage3 else 1]))
    if not parts or not all(isinstance(part, TensorRef) and len(part.shape) == 1 for part in parts):
        raise CorruptError(f"{states.file!r} lacks the list of flat tensors {_FLAT[3 if stage3 else 1]!r}")
    shard = RankShard(states.file, stage3, end=states.end)
    shard.flat[MASTER] = [_located(states, part, f"{MASTER} of group {g}") for g, part in enumerate(parts)]
    shard.counts = _counts(states, whole.get("partition_count"), len(parts))
    _refuse_uneven(states, whole, shard.counts)
    base = whole.get("optimizer_state_dict" if stage3 else "base_optimizer_state")
    _states(states, shard, base)
    if not stage3:
        shard.paddings = _numbers(states, whole.get("group_paddings"), len(parts), "group_paddings")
        aligned = whole.get("param_alignment_paddings")
        if aligned is not None and len(items(aligned)) != len(parts):
            raise CorruptError(
                f"{states.file!r}: param_alignment_paddings is {aligned!r:.80} for {plural(len(parts), 'group')}"
            )
        if aligned is not None:
            shard.aligned = [_numbers(states, row, None, "param_alignment_paddings") or [] for row in aligned]
        mappings = whole.get("param_slice_mappings")
        if isinstance(mappings, (list, tuple)) and all(isinstance(m, Mapping) for m in mappings):
            shard.order = [list(mapping) for mapping in mappings]
    shard.info = whole.get("universal_checkpoint_info")
    return shard


def _states(states: States, shard: RankShard, base: object) -> None:
    """Add the moments and scalars of the wrapped optimizer."""
    groups: Sequence[Any] = ()
    if isinstance(base, (list, tuple)):  # elastic_checkpoint: one dict per group
        found: Mapping[Any, Any] = dict(enumerate(base))
    elif isinstance(base, Mapping):
        state = base.get("state")
        found = state if isinstance(state, Mapping) else {}
        groups = items(base.get("param_groups"))
    else:
        return
    shard.steps = [s for g in groups if isinstance(g, Mapping) and type(s := g.get("step")) is int]
    for group, ident in enumerate(_idents(groups, shard.groups)):
        state = found.get(ident)
        if not isinstance(state, Mapping):
            continue
        master = shard.flat[MASTER][group]
        shortest = master.shape[0] if master else 0
        for name, ref in state.items():
            if not isinstance(ref, TensorRef) or type(name) is not str:
                continue
            part = _located(states, ref, f"{name} of group {group}")
            # a partition has the length of the master's, which may lack its padding
            if len(ref.shape) == 1 and name != "step" and ref.shape[0] >= shortest:
                shard.flat.setdefault(name, [None] * shard.groups)[group] = part
            else:
                shard.scalars[group, name] = part


def _idents(groups: Sequence[Any], count: int) -> list[Any]:
    """Return the optimizer's id of each flat group: its only parameter, otherwise its position."""
    idents = [i for g in groups if isinstance(g, Mapping) for i in items(g.get("params"))]
    return idents if len(idents) == count and all(type(i) is int for i in idents) else list(range(count))


def _located(states: States, ref: TensorRef, what: str) -> Located:
    part = states.locate(ref, what)
    if len(ref.shape) == 1 and ref.stride != (1,) and ref.shape[0] > 1:
        raise CorruptError(f"{states.file!r}: {what} has a stride of {ref.stride[0]}; a partition is contiguous")
    return part


def _counts(states: States, stored: object, groups: int) -> list[int]:
    counts: list[Any] = list(stored) if isinstance(stored, (list, tuple)) else [stored] * groups
    if stored is None or len(counts) != groups or any(type(n) is not int or not 0 < n <= MAX_RANKS for n in counts):
        raise CorruptError(f"{states.file!r}: partition_count is {stored!r:.80} for {groups} groups")
    return counts


def _refuse_uneven(states: States, whole: Mapping[Any, Any], counts: list[int]) -> None:
    for group in items(whole.get("ds_zero_partition_groups")):
        count = group.get("partition_count") if isinstance(group, Mapping) else None
        if count is not None and count != counts[0]:
            raise UnsupportedFormatError(
                f"{states.file!r} is an AutoEP stage 3 checkpoint: {count!r:.20} of {counts[0]} ranks share some "
                "groups; convert it with ds_to_universal.py and open the result"
            )


def _numbers(states: States, value: object, count: int | None, what: str) -> list[int] | None:
    if value is None:
        return None
    fits = isinstance(value, (list, tuple)) and all(type(n) is int and 0 <= n < 1 << 55 for n in value)
    if not fits or (count is not None and len(value) != count):  # type: ignore[arg-type]
        raise CorruptError(f"{states.file!r}: {what} is {value!r:.80}, not {count or 'some'} sizes")
    return list(value)  # type: ignore[call-overload]


def _number(value: object) -> int | None:
    """Return an integer, also from one of DeepSpeed's pickled enums."""
    if isinstance(value, Opaque) and len(value.args) == 1:
        value = value.args[0]
    return value if type(value) is int else None
