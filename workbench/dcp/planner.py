"""Plan a save: boxes of irregular shards, replicas compared and spread over the ranks, plans kept for the next save.

::

    each rank     state dict ──► items: boxes, types        + a digest of what other ranks may hold, too
    rank 0        items of all ranks ──► writer of each     replicas cut and spread (``balance``)
                  digests           ──► replicas that differ
    each rank     its items, kept under a token: the next save of the same structure sends the token, and the digests
                  of what other ranks do hold, too; rank 0 compares these, and uses its plan and metadata again

Source: torch 2.13 ``distributed/checkpoint/default_planner.py``, ``planner_helpers.py``, ``_dedup_save_plans.py``.
"""

from __future__ import annotations

import dataclasses
import io
import struct
import threading
import uuid
import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    _validate_global_plan,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.distributed.tensor import DTensor, Replicate

from workbench.core.garbage import uncollected
from workbench.core.words import plural
from workbench.dcp.balance import cut, spread
from workbench.dcp.datafile import bytes_of
from workbench.errors import UsageError, WriteError
from workbench.load.boxes import cut_held, held

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:
    TensorGuards = None  # type: ignore[assignment, misc]

UNKNOWN = bytes(16)  #: the digest of an item that was not hashed
NAMED = 4  #: names in a warning
PART = 1024  #: values of a state dict that are looked at together: few enough for the cache of a core
KEPT = 4  #: structures whose plans a rank keeps; rank 0 keeps more, since it must know every plan that a rank knows
_Box = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  #: offsets, sizes, first element in the local tensor


class Planner(DefaultSavePlanner):
    """Plan ``dcp.save`` and ``dcp.async_save``: balanced ranks, irregular shards, replicas compared.

    Replicated tensors (parameters under DDP, the replicas of HSDP) are written by the rank with the fewest bytes,
    largest tensors first; tensors of more than ``split_above`` bytes are cut, so each rank writes a part. A tensor
    whose local part is not one box (``_StridedShard``) is saved as several. Nothing is communicated except plans.

    The saved checkpoint is read by ``dcp.load`` of any supported torch, without this package.

    Args:
        balance: ``"bytes"`` spreads replicas; ``"lowest"`` has the lowest rank write each, for users who read the
            files of single ranks.
        split_above: replicated tensors with more bytes are cut.
        cache: keep the plans for saves of the same names, types, shapes and placements.
        check_replicas: hash replicated tensors in host memory, and plain objects, and warn about those that differ
            between ranks. The value of the lowest rank is then saved. Tensors on a device are not compared in a
            synchronous save.
        flatten_state_dict, flatten_sharded_tensors: as for torch's ``DefaultSavePlanner``.
        dedup_save_to_lowest_rank: torch's name for ``balance="lowest"``.
        dedup_replicated_tensors, enable_plan_caching: accepted, without effect.

    Raises:
        UsageError: an unknown ``balance``; while planning, a DTensor whose local shape is not what its placements
            imply.
        WriteError: while planning, rank 0 lost the plans that the other ranks kept; the next save sends them.
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        dedup_replicated_tensors: bool | None = None,
        dedup_save_to_lowest_rank: bool = False,
        enable_plan_caching: bool = False,
        *,
        balance: str = "bytes",
        split_above: int = 64 << 20,
        cache: bool = True,
        check_replicas: bool = True,
    ) -> None:
        super().__init__(flatten_state_dict, flatten_sharded_tensors)
        if balance not in ("bytes", "lowest"):
            raise UsageError(f'balance is {balance!r}; use "bytes" or "lowest"')
        self._balance = "lowest" if dedup_save_to_lowest_rank else balance
        self._split_above, self._keep, self._check = max(split_above, 1), cache, check_replicas
        self._nested: dict[str, Any] = {}
        self._mappings: Any = None
        self._flat: _Named | None = None
        self._state: dict[str, Any] = {}
        self._boxes: dict[str, list[_Box]] = {}
        self._local: _Kept | None = None
        #: tensors and objects that differed between ranks at the last save, as sentences; on rank 0
        self.differences: list[str] = []
        #: whether the plan of the last save was kept from an earlier one
        self.cached = False

    # ---- each rank ----

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Flatten the state dict as torch does, but a level of tensors at once; paths are made when they are needed."""
        with uncollected():
            flat = _flattened(state_dict) if self.flatten_state_dict else None
        if flat is None:
            super().set_up_planner(state_dict, storage_meta, is_coordinator)
            return
        self._flat, self._nested, self._mappings = flat, dict(state_dict), None
        self.is_coordinator = is_coordinator

    @property
    def state_dict(self) -> dict[str, Any]:
        """Values by name, flattened, as in torch."""
        if (flat := self._flat) is not None:
            self._state = dict(zip(*flat, strict=True))
            self._flat = None
        return self._state

    @state_dict.setter
    def state_dict(self, flat: dict[str, Any]) -> None:
        self._state, self._flat = flat, None

    def _named(self) -> _Named:
        if self._flat is not None:
            return self._flat
        return _Named(tuple(self._state), list(self._state.values()))

    @property
    def mappings(self) -> Any:
        """Path of each name in the state dict, as in torch."""
        if self._mappings is None:
            self._mappings = flatten_state_dict(self._nested)[1]
        return self._mappings

    @mappings.setter
    def mappings(self, paths: Any) -> None:
        self._mappings = paths

    def create_local_plan(self) -> SavePlan:
        """Return this rank's items, or the token of a plan that rank 0 has."""
        options = self._balance, self._split_above, self._check, self.flatten_state_dict, _ranks()
        with uncollected():
            named = self._named()
            known = _PLANS.known(options, named) if self._keep else None
        _PLANS.in_doubt(True)  # until this plan is agreed on, tokens are not relied on
        if known is None:
            signature = _Signature.of(options, named) if self._keep else None
            items, boxes, fixed = _items(self.state_dict)
            shared = _shared(items, self.state_dict)
            self._local, self._boxes = _Kept("", items, [], boxes, shared, signature), boxes
            facts = _LocalFacts("", self._digests(), shared, fixed, self.mappings if self.flatten_state_dict else None)
            self.plan = SavePlan(items, planner_data=facts)
        else:
            self._local, self._boxes = known, known.boxes
            self.plan = SavePlan([], planner_data=_LocalFacts(known.token, self._digests()))
        return self.plan

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the items that this rank writes."""
        final = new_plan.planner_data
        if not isinstance(final, _Final) or self._local is None:
            return super().finish_plan(new_plan)
        items = self._local.final if final.kept else new_plan.items
        self.cached = final.kept
        if self._keep and not final.kept:
            _PLANS.keep(dataclasses.replace(self._local, token=final.token, final=items, shared=final.shared))
        _PLANS.in_doubt(False)
        self.plan = SavePlan(items, storage_data=new_plan.storage_data)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the data of an item: a tensor, a part of one, or a pickled object."""
        if write_item.type == WriteItemType.BYTE_IO:
            return super().resolve_data(write_item)
        return self.transform_object(write_item, self._piece(write_item))

    def _piece(self, item: WriteItem) -> torch.Tensor:
        index, sizes = item.index, tuple(item.tensor_data.chunk.sizes)
        value = self.state_dict[index.fqn]
        boxes = self._boxes.get(index.fqn)
        if boxes is None:
            if not _is_plain(value) or tuple(value.shape) == sizes:
                return self.lookup_object(index)
            boxes = [((0,) * value.ndim, tuple(value.shape), (0,) * value.ndim)]
        local = (value.to_local() if isinstance(value, DTensor) else value).detach()
        if not prod(sizes):
            return local.new_empty(sizes)
        at = tuple(index.offset or ())
        for offsets, held_sizes, start in boxes:
            low = [x - a for x, a in zip(at, offsets, strict=True)]
            if all(x >= 0 and x + n <= m for x, n, m in zip(low, sizes, held_sizes, strict=True)):
                return local[tuple(slice(s + x, s + x + n) for s, x, n in zip(start, low, sizes, strict=True))]
        raise WriteError(f"tensor {index.fqn!r}: the plan has a box at {at} of {sizes}, which is not on this rank")

    def _digests(self) -> bytes:
        """Return the 16-byte digests of the items that other ranks may hold, too."""
        assert self._local is not None
        if not self._check:
            return UNKNOWN * len(self._local.shared)
        return b"".join(self._digest(self._local.items[at]) for at in self._local.shared)

    def _digest(self, item: WriteItem) -> bytes:
        if item.type == WriteItemType.BYTE_IO:
            hasher = xxhash.xxh3_128()
            return hasher.digest() if _hash_object(self.state_dict[item.index.fqn], hasher) else UNKNOWN
        tensor = self._piece(item)
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return UNKNOWN
        hasher = xxhash.xxh3_128(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        hasher.update(bytes_of(tensor))
        return hasher.digest()

    # ---- rank 0 ----

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Decide which rank writes which item.

        Raises:
            ValueError: the items of a tensor overlap, or do not cover it.
        """
        facts: list[_LocalFacts] = [plan.planner_data for plan in all_plans]
        if not all(isinstance(one, _LocalFacts) for one in facts):
            return super().create_global_plan(all_plans)  # a subclass created the plans itself
        agreed = [_PLANS.agreed(one.token, rank, len(facts)) for rank, one in enumerate(facts)]
        digests = [one.digests for one in facts]
        kept = agreed[0]
        if kept is not None and all(one is kept for one in agreed) and kept.replicas.are_equal(digests):
            self._report({})
            found, token = kept, facts[0].token.partition(".")[0]
        else:
            kept, (found, token) = None, self._agree_anew(all_plans, facts, agreed)
        self.global_plan = [SavePlan(one) for one in found.final]
        self.metadata = dataclasses.replace(found.metadata)
        return [
            SavePlan([], planner_data=_Final(f"{token}.{rank}", True))
            if kept
            else SavePlan(one, planner_data=_Final(token and f"{token}.{rank}", False, found.replicas.shared[rank]))
            for rank, one in enumerate(found.final)
        ], self.metadata

    def _agree_anew(
        self, plans: Sequence[SavePlan], facts: Sequence[_LocalFacts], agreed: Sequence[_Agreed | None]
    ) -> tuple[_Agreed, str]:
        """Return a plan and its token, which is empty if the next save has to decide again."""
        items = [plans[rank].items if one is None else one.items[rank] for rank, one in enumerate(agreed)]
        known = [facts[rank] if one is None else one.facts[rank] for rank, one in enumerate(agreed)]
        digests = [
            one.digests if kept is None else kept.replicas.whole(rank, kept.facts[rank].shared, one.digests)
            for rank, (one, kept) in enumerate(zip(facts, agreed, strict=True))
        ]
        different = _different(items, known, digests)
        self._report(different)
        replicas = _Replicas.of(items, known)
        # A rank that kept its plan sent no digests of what it alone held then: if another rank has it now, it is not
        # known whether they are equal, and the lowest rank writes it.
        unknown = {
            _key(items[rank][at])
            for rank, kept in enumerate(agreed)
            if kept is not None
            for at in set(replicas.shared[rank]) - set(kept.replicas.shared[rank])
        }
        found = self._agree(items, known, replicas, different.keys() | unknown)
        if not self._keep or different or unknown:
            return found, ""
        token = uuid.uuid4().hex
        _PLANS.agree(token, found)
        return found, token

    def _agree(
        self, items: list[list[WriteItem]], facts: list[_LocalFacts], replicas: _Replicas, different: Set[Any]
    ) -> _Agreed:
        plans = self._spread(items, [set(one.fixed) for one in facts], different)
        global_plan, metadata = create_default_global_save_plan(plans)
        if self.flatten_state_dict:
            merged: dict[str, Any] = {}
            for one in reversed(facts):
                merged |= one.mappings or {}
            metadata = dataclasses.replace(metadata, planner_data=merged)
        wrong = _validate_global_plan(global_plan, metadata)
        if wrong is False or (wrong is not True and wrong):  # torch before 2.9 returns whether the plan is valid
            words = "" if wrong is False else ": " + "; ".join(wrong)[:500]
            raise ValueError(f"Failed to validate global plan{words}")
        return _Agreed(items, facts, replicas, [plan.items for plan in global_plan], metadata)

    def _spread(self, items: list[list[WriteItem]], fixed: list[set[int]], different: Set[Any]) -> list[SavePlan]:
        holders: dict[Any, list[int]] = {}
        first: dict[Any, tuple[int, int]] = {}
        for rank, mine in enumerate(items):
            for at, item in enumerate(mine):
                holders.setdefault(_key(item), []).append(rank)
                first.setdefault(_key(item), (rank, at))
        plans: list[list[WriteItem]] = [[] for _ in items]
        loads = [0] * len(items)
        parts: list[tuple[WriteItem, int, list[int]]] = []
        for key, ranks in holders.items():
            rank, at = first[key]
            item = items[rank][at]
            nbytes = _nbytes(item)
            if len(ranks) == 1 or self._balance == "lowest" or key in different or item.tensor_data is None:
                plans[ranks[0]].append(item)
                loads[ranks[0]] += nbytes
            elif at in fixed[rank]:
                parts.append((item, nbytes, ranks))
            else:
                parts += [(one, _nbytes(one), ranks) for one in _cut(item, self._split_above)]
        chosen = spread(loads, [nbytes for _, nbytes, _ in parts], [ranks for *_, ranks in parts])
        for (item, _, _), rank in zip(parts, chosen, strict=True):
            plans[rank].append(item)
        return [SavePlan(mine) for mine in plans]

    def _report(self, different: Mapping[Any, list[list[int]]]) -> None:
        self.differences = [
            f"{key[0]!r}: {' ≠ '.join('rank ' + ', '.join(map(str, ranks)) for ranks in groups)}"
            for key, groups in different.items()
        ]
        if self.differences:
            more = len(self.differences) - NAMED
            warnings.warn(
                f"{plural(len(self.differences), 'replicated value', 'differ')} between ranks; those of the "
                "lowest rank are "
                f"saved: {'; '.join(self.differences[:NAMED])}" + (f"; … {more:,} more" if more > 0 else ""),
                stacklevel=2,
            )


# ---- what is sent and kept -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _LocalFacts:
    """A rank's message with its plan.

    Attributes:
        token: the plan that the rank kept, instead of its items; the other attributes are then those of that plan.
        digests: of the items that other ranks may hold, too; with a token, of those that they did hold.
        shared: positions of the items that other ranks may hold, too.
        fixed: positions of the items that cannot be cut.
        mappings: path of each name in the state dict.
    """

    token: str
    digests: bytes
    shared: Sequence[int] = ()
    fixed: Sequence[int] = ()
    mappings: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class _Final:
    """The message to a rank with its plan.

    Attributes:
        token: the name of the plan, if the next save may use it.
        kept: whether it is the one that the rank has.
        shared: positions of the rank's items that other ranks hold, too.
    """

    token: str
    kept: bool
    shared: Sequence[int] = ()


class _Named(NamedTuple):
    """A flat state dict, before it is made."""

    names: tuple[str, ...]
    values: list[Any]


@dataclass(frozen=True)
class _Signature:
    """What decides about the items of a state dict: options, names, and the facts of each ``PART`` of its values."""

    options: tuple[Any, ...]
    names: tuple[str, ...]
    facts: list[_Facts]

    @classmethod
    def of(cls, options: tuple[Any, ...], flat: _Named) -> _Signature:
        """Return the signature of a state dict."""
        return cls(options, flat.names, [_Facts.of(part) for part in _parts(flat.values)])

    def fits(self, options: tuple[Any, ...], flat: _Named) -> bool:
        """Return whether it is that of a state dict; each part is compared while it is in the cache."""
        if options != self.options or flat.names != self.names:
            return False
        return all(map(_Facts.fit, self.facts, _parts(flat.values)))


@dataclass(frozen=True)
class _Facts:
    """What decides about the items of some values.

    Attributes:
        kinds: their types.
        columns: attributes of the tensors in host or device memory: of plain ones, and of the local ones of DTensors.
        placed: attributes of the DTensors.
        guard: torch's own comparison with those tensors, which takes a third of the time. If it says no, they may
            still fit: it also compares strides, and does not accept the same tensor twice.
    """

    kinds: list[type]
    columns: tuple[list[Any], ...]
    placed: tuple[list[Any], ...]
    guard: Any = field(compare=False)

    @classmethod
    def of(cls, values: Sequence[Any]) -> _Facts:
        kinds, tensors, placed = _divided(values)
        columns = _columns(tensors)
        guard = None
        if TensorGuards is not None and torch.is_grad_enabled() and set(columns[2]) == {torch.strided}:
            guard = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        return cls(kinds, columns, placed, guard)

    def fit(self, values: Sequence[Any]) -> bool:
        """Return whether they are those of some values."""
        kinds, tensors, placed = _divided(values)
        if kinds != self.kinds or placed != self.placed:
            return False
        if self.guard is not None and torch.is_grad_enabled() and self.guard.check(*tensors):
            return True
        return _columns(tensors) == self.columns


@dataclass(frozen=True)
class _Replicas:
    """The items that several ranks hold.

    Attributes:
        shared: of each rank: the positions of these items, ascending.
        order: the digests of all ranks, one after the other, in the order of the items.
        group: for each of these, the number of the item.
    """

    shared: list[list[int]]
    order: np.ndarray[Any, Any]
    group: np.ndarray[Any, Any]

    @classmethod
    def of(cls, items: Sequence[Sequence[WriteItem]], facts: Sequence[_LocalFacts]) -> _Replicas:
        keys = [[_key(mine[at]) for at in one.shared] for mine, one in zip(items, facts, strict=True)]
        holders = Counter(key for several in keys for key in several)
        numbers = {key: number for number, (key, count) in enumerate(holders.items()) if count > 1}
        pairs = [
            [(at, numbers[key]) for at, key in zip(one.shared, several, strict=True) if key in numbers]
            for one, several in zip(facts, keys, strict=True)
        ]
        group = np.array([number for several in pairs for _, number in several], np.int64)
        order = np.argsort(group, kind="stable")
        return cls([[at for at, _ in several] for several in pairs], order, group[order])

    def are_equal(self, digests: Sequence[bytes]) -> bool:
        """Return whether no rank's digests of these items differ from another's; unknown ones do not."""
        rows = np.frombuffer(b"".join(digests), np.uint64).reshape(-1, 2)[self.order]
        known = rows.any(axis=1)
        rows, group = rows[known], self.group[known]
        return not np.any((rows[1:] != rows[:-1]).any(axis=1) & (group[1:] == group[:-1]))

    def whole(self, rank: int, shared: Sequence[int], digests: bytes) -> bytes:
        """Return a rank's digests of the items ``shared``, where those of other items are unknown."""
        found = np.zeros((len(shared), 2), np.uint64)
        found[np.searchsorted(shared, self.shared[rank])] = np.frombuffer(digests, np.uint64).reshape(-1, 2)
        return found.tobytes()


@dataclass(frozen=True)
class _Kept:
    """A plan that a rank keeps."""

    token: str
    items: list[WriteItem]
    final: list[WriteItem]
    boxes: dict[str, list[_Box]]
    shared: Sequence[int]
    signature: _Signature | None


@dataclass(frozen=True)
class _Agreed:
    """The state kept by rank 0, by rank: the items that it received, and those that it decided on."""

    items: list[list[WriteItem]]
    facts: list[_LocalFacts]
    replicas: _Replicas
    final: list[list[WriteItem]]
    metadata: Metadata


@dataclass
class _Plans:
    """The plans that this process keeps; saves may run in several threads.

    Attributes:
        levels: of the state dict flattened last: prefix of a level → its keys, and their names.
        names: of that state dict, which are known to be different.
    """

    levels: dict[str, tuple[tuple[str, ...], list[str]]] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    _kept: list[_Kept] = field(default_factory=list)
    _agreed: OrderedDict[str, _Agreed] = field(default_factory=OrderedDict)
    _doubt: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def in_doubt(self, doubt: bool) -> None:
        with self._lock:
            self._doubt = doubt

    def known(self, options: tuple[Any, ...], flat: _Named) -> _Kept | None:
        with self._lock:
            kept = [] if self._doubt else self._kept[::-1]
        return next((one for one in kept if one.signature and one.signature.fits(options, flat)), None)

    def keep(self, plan: _Kept) -> None:
        with self._lock:
            kept = [one for one in self._kept if one.signature != plan.signature]
            # Without a token, replicas differed: the next save has to decide again.
            self._kept = [*kept, plan][-KEPT:] if plan.token else kept

    def agree(self, token: str, plan: _Agreed) -> None:
        with self._lock:
            self._agreed[token] = plan
            while len(self._agreed) > 4 * KEPT:
                self._agreed.popitem(last=False)

    def agreed(self, token: str, rank: int, ranks: int) -> _Agreed | None:
        """Return the plan that a rank's token represents; ``None`` if the rank sent its items instead."""
        if not token:
            return None
        name, _, number = token.partition(".")
        with self._lock:
            found = self._agreed.get(name)
        if found is None or int(number) != rank or len(found.items) != ranks:
            raise WriteError("rank 0 does not have the plan that another rank kept; save again, which sends all plans")
        return found


_PLANS = _Plans()


# ---- items -----------------------------------------------------------------------------------------------------------


def _items(state_dict: Mapping[str, Any]) -> tuple[list[WriteItem], dict[str, list[_Box]], list[int]]:
    """Return the items of this rank, the boxes of its DTensors, and the positions of items that cannot be cut."""
    by_name: dict[str, list[WriteItem]] = {}
    regular = []
    fixed: set[str] = set()
    for fqn, value in state_dict.items():
        if isinstance(value, DTensor):
            if value.device_mesh.get_coordinate() is None:
                continue
            by_name[fqn] = []
            try:
                if hasattr(value._local_tensor, "__create_write_items__"):
                    raise UsageError("it describes itself")
                regular.append(held(fqn, value))
            except UsageError:
                by_name[fqn] = _create_write_items(fqn, value)
                fixed.add(fqn)
        else:
            by_name[fqn] = _create_write_items(fqn, value)
            if not _is_plain(value):
                fixed.add(fqn)
    boxes: dict[str, list[_Box]] = {}
    dims = max((len(one.shape) for one in regular), default=0)
    found = cut_held(regular, max(dims, 1))
    for row, tensor in enumerate(found.tensor.tolist()):
        one = regular[tensor]
        ndim = len(one.shape)
        rows = range(found.ptr[row], found.ptr[row + 1])
        mine: list[_Box] = []
        for k in rows:
            offsets, sizes = found.offsets[k, :ndim].tolist(), found.sizes[k, :ndim].tolist()
            start = np.unravel_index(int(found.at[k]), one.local.shape) if ndim else ()
            mine.append((tuple(offsets), tuple(sizes), tuple(map(int, start))))
        boxes[one.name] = mine
        if not prod(one.shape):
            mine = [((0,) * ndim, one.shape, (0,) * ndim)]
        properties = TensorProperties.create_from_tensor(one.local)
        size = torch.Size(one.shape)
        for begin, extent, _ in mine:
            chunk = ChunkStorageMetadata(offsets=torch.Size(begin), sizes=torch.Size(extent))
            by_name[one.name].append(
                WriteItem(
                    MetadataIndex(one.name, chunk.offsets),
                    WriteItemType.SHARD,
                    tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=size),
                )
            )
    items = [item for several in by_name.values() for item in several]
    return items, boxes, [at for at, item in enumerate(items) if item.index.fqn in fixed]


def _shared(items: Sequence[WriteItem], state_dict: Mapping[str, Any]) -> list[int]:
    """Return the positions of items that other ranks may hold, too."""
    if _ranks()[1] == 1:
        return []
    found = []
    for at, item in enumerate(items):
        value = state_dict[item.index.fqn]
        if isinstance(value, DTensor):
            replicated = any(
                isinstance(placement, Replicate) and size > 1
                for placement, size in zip(value.placements, value.device_mesh.shape, strict=True)
            )
            if not replicated and prod(value.shape):
                continue
        elif isinstance(value, torch.Tensor) and not _is_plain(value):
            continue
        found.append(at)
    return found


def _flattened(state_dict: Mapping[str, Any]) -> _Named | None:
    """Return the result of ``flatten_state_dict``; ``None`` if there are sharded tensors or equal names."""
    names: list[str] = []
    values: list[Any] = []
    before = _PLANS.levels
    used: dict[str, tuple[tuple[str, ...], list[str]]] = {}

    def add(level: Mapping[Any, Any], prefix: str) -> None:
        kinds = set(map(type, level.values()))
        if kinds <= _PLAIN or not any(issubclass(kind, (Mapping, list)) for kind in kinds):
            keys = tuple(level)
            known = before.get(prefix)
            if known is None or known[0] != keys:
                known = keys, [f"{prefix}{key}" for key in keys]
                if set(map(type, keys)) == {str}:  # 1 equals True, and has another name
                    used[prefix] = known
            else:
                used[prefix] = known
            names.extend(known[1])
            values.extend(level.values())
            return
        for key, value in level.items():
            if type(value) is dict or isinstance(value, Mapping):
                add(value, f"{prefix}{key}.")
                continue
            # torch looks into some lists
            found = flatten_state_dict({str(key): value})[0] if isinstance(value, list) else {str(key): value}
            names.extend(f"{prefix}{name}" for name in found)
            values.extend(found.values())

    add(state_dict, "")
    _PLANS.levels = used
    flat = _Named(tuple(names), values)
    if flat.names != _PLANS.names:
        if len(set(names)) != len(names):
            return None
        _PLANS.names = flat.names
    sharded = any(issubclass(kind, ShardedTensor) for kind in set(map(type, values)))
    return None if sharded else flat


def _parts(values: Sequence[Any]) -> Iterator[Sequence[Any]]:
    return (values[at : at + PART] for at in range(0, len(values), PART))


def _divided(values: Sequence[Any]) -> tuple[list[type], Sequence[torch.Tensor], tuple[list[Any], ...]]:
    """Return the types of values, the plain tensors and the local ones of DTensors, and attributes of the DTensors."""
    kinds = list(map(type, values))
    if _PLAIN.issuperset(kinds):
        return kinds, values, ()
    tensors = [one for one, kind in zip(values, kinds, strict=True) if kind in _PLAIN]
    placed = [one for one, kind in zip(values, kinds, strict=True) if kind is DTensor]
    tensors += map(attrgetter("_local_tensor"), placed)
    specs = list(map(attrgetter("_spec"), placed))
    columns = [list(map(attrgetter(name), specs)) for name in ("tensor_meta", "placements", "mesh")]
    # other kinds of tensors are planned anew each time
    others = [one for one, kind in zip(values, kinds, strict=True) if kind not in _PLACED]
    strange = [object() for one in others if isinstance(one, torch.Tensor) or hasattr(one, "local_shards")]
    return kinds, tensors, (*columns, list(map(type, tensors)), strange)


def _columns(tensors: Sequence[torch.Tensor]) -> tuple[list[Any], ...]:
    return tuple(list(map(attrgetter(name), tensors)) for name in ("dtype", "shape", "layout", "requires_grad"))


_PLAIN = {torch.Tensor, torch.nn.Parameter}
_PLACED = {*_PLAIN, DTensor}


def _is_plain(value: Any) -> bool:
    return type(value) is torch.Tensor or type(value) is torch.nn.Parameter


def _ranks() -> tuple[int, int]:
    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def _key(item: WriteItem) -> tuple[Any, ...]:
    """Return a key that is equal for replicas of an item; only one plain tensor of a name can be saved."""
    sizes = tuple(item.tensor_data.chunk.sizes) if item.type == WriteItemType.SHARD else None
    return item.index.fqn, item.index.offset, sizes


def _nbytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 1
    return int(prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize)


def _cut(item: WriteItem, above: int) -> Iterator[WriteItem]:
    data = item.tensor_data
    parts = cut(tuple(data.chunk.offsets), tuple(data.chunk.sizes), data.properties.dtype.itemsize, above)
    if len(parts) == 1:
        yield item
        return
    for offsets, sizes in parts:
        chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
        yield dataclasses.replace(
            item,
            index=MetadataIndex(item.index.fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=dataclasses.replace(data, chunk=chunk),
        )


def _different(
    items: Sequence[Sequence[WriteItem]], facts: Sequence[_LocalFacts], digests: Sequence[bytes]
) -> dict[Any, list[list[int]]]:
    """Return the items whose replicas differ: groups of ranks that agree."""
    seen: dict[Any, dict[Any, list[int]]] = {}
    shapes: dict[Any, dict[Any, list[int]]] = {}
    for rank, (mine, one, data) in enumerate(zip(items, facts, digests, strict=True)):
        for number, at in enumerate(one.shared):
            item, digest = mine[at], data[16 * number : 16 * number + 16]
            if digest != UNKNOWN:
                seen.setdefault(_key(item), {}).setdefault(digest, []).append(rank)
            if item.tensor_data is not None:
                kind = tuple(item.tensor_data.size), item.tensor_data.properties.dtype
                shapes.setdefault(_key(item), {}).setdefault(kind, []).append(rank)
    return {key: list(groups.values()) for kinds in (seen, shapes) for key, groups in kinds.items() if len(groups) > 1}


def _hash_object(value: Any, hasher: Any) -> bool:
    """Add plain values, containers of them, and tensors; return whether nothing else was found.

    A pickle would not work: equal objects may have different pickles.
    """
    hasher.update(type(value).__name__.encode() + b"\0")
    if isinstance(value, torch.Tensor):
        if type(value.detach()) is not torch.Tensor or value.device.type != "cpu" or value.layout != torch.strided:
            return False
        hasher.update(f"{value.dtype}{tuple(value.shape)}".encode())
        hasher.update(bytes_of(value))
        return True
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        hasher.update(f"{value.dtype}{value.shape}".encode())
        hasher.update(np.ascontiguousarray(value))
        return True
    if isinstance(value, float):
        hasher.update(struct.pack("<d", value))
        return True
    if isinstance(value, bytes | bytearray):
        hasher.update(len(value).to_bytes(8, "little"))
        hasher.update(value)
        return True
    if value is None or isinstance(value, bool | int | str):
        hasher.update(repr(value).encode())
        return True
    if isinstance(value, Mapping):
        hasher.update(str(len(value)).encode())
        return all(_hash_object(key, hasher) and _hash_object(one, hasher) for key, one in value.items())
    if isinstance(value, list | tuple):
        hasher.update(str(len(value)).encode())
        return all(_hash_object(one, hasher) for one in value)
    return False
