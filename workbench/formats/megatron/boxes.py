"""Megatron's stacks and fused weights as box arithmetic on a catalog; no byte is read.

::

    stored      decoder.layers.mlp.linear_fc2.weight        (layers, out, in)     one chunk per layer and TP rank
    listed      decoder.layers.3.mlp.linear_fc2.weight      (out, in)             :func:`unstack`
    views       decoder.layers.3.self_attention.linear_q.weight, linear_k, linear_v    rows of the grouped linear_qkv
                decoder.layers.3.input_layernorm.weight     the norm's other spelling
                decoder.layers.3.mlp.experts.local_experts.5.linear_fc2.weight    one expert of a stack

Views show bytes of listed tensors. They are found by key and by ``ckpt.param``, but not listed, summed or scanned.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from workbench.core import box, codecs
from workbench.core.arrays import Array
from workbench.core.box import row_major
from workbench.core.catalog import Catalog, ObjectTable
from workbench.core.dtypes import ITEMSIZE
from workbench.core.rebox import ComposedBox, Composition, compose
from workbench.formats.megatron import layout
from workbench.formats.megatron.args import RunArgs

MAX_DEPTH = 1 << 16  #: layers or experts of a stack; no model has more
MAX_LOST = 4096  #: … without a chunk
MAX_PARTS = 1 << 22  #: tensors and chunks that cutting may add to the stored ones
_QKV = re.compile(r"(.+\.self_attention\.linear_)qkv(\.(?:weight|bias))", re.S)
_STACKED_EXPERTS = re.compile(r"(.+\.mlp\.experts\.)experts\.linear_fc[12]\.(?:weight|bias)", re.S)
_ONE_EXPERT = re.compile(
    r"(.+\.mlp\.experts\.)(?:local_experts\.(\d{1,6})\.(linear_fc[12]\.(?:weight|bias))|"
    r"(linear_fc[12]\.(?:weight|bias))(\d{1,6}))",
    re.S,
)


def unstack(catalog: Catalog, stacked: Array, name: Callable[[str, int], str]) -> Catalog:
    """Replace each stack in a catalog by its slices along axis 0, as separate tensors.

    Args:
        stacked: ``(T,) bool`` tensors to cut, with one axis or more each.
        name: returns a part's key from the stack's key and the position in it.

    Returns:
        A catalog without fqns and roles.
    """
    depth = np.where(stacked, catalog.shape[:, 0], 1)
    first = np.concatenate([[0], np.cumsum(depth)])
    owner = catalog.tensor
    cut = stacked[owner]
    count = np.where(cut, catalog.sizes[:, 0], 1)
    row = np.repeat(np.arange(catalog.chunks), count)
    within = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    cut = cut[row]
    tensor = first[owner[row]] + np.where(cut, catalog.offsets[row, 0] + within, 0)

    steps = (row_major(catalog.sizes) if catalog.strides is None else catalog.strides)[row]
    itemsize = ITEMSIZE[catalog.dtype[owner[row]]]
    inner = np.where(cut, within * steps[:, 0] * itemsize, 0)
    inner += 0 if catalog.inner is None else catalog.inner[row]
    order = np.argsort(tensor, kind="stable")
    row, tensor, cut = row[order], tensor[order], cut[order]
    back = np.repeat(np.arange(len(stacked)), depth)
    codec = catalog.codec[row]
    result = replace(
        catalog,
        keys=[
            part
            for key, cut_, parts in zip(catalog.keys, stacked.tolist(), depth.tolist(), strict=True)
            for part in ([name(key, k) for k in range(parts)] if cut_ else [key])
        ],
        dtype=catalog.dtype[back],
        ndim=(catalog.ndim - stacked)[back].astype(np.uint8),
        shape=_shifted(catalog.shape[back], stacked[back], 1),
        row_ptr=np.searchsorted(tensor, np.arange(first[-1] + 1)).astype(np.int64),
        offsets=_shifted(catalog.offsets[row], cut, 0),
        sizes=_shifted(catalog.sizes[row], cut, 1),
        strides=_shifted(steps[order], cut, 0),
        inner=inner[order],
        codec=np.where(cut, codecs.PART[codec], codec).astype(np.uint8),
        fqns=None,
        roles=None,
        **{column: getattr(catalog, column)[row] for column in ("file", "start", "stop", "rank", "replica")},
    )
    return _trimmed(result)


def cuttable(catalog: Catalog, wanted: Array) -> Array:
    """Return the wanted stacks that :func:`unstack` can cut: with chunks for their depth, and not too many parts.

    Args:
        wanted: ``(T,) bool``.
    """
    wanted = wanted & (catalog.ndim > 0)
    depth = catalog.shape[:, 0]
    reach = np.bincount(catalog.tensor, catalog.sizes[:, 0], minlength=len(catalog))
    found = wanted & (depth <= MAX_DEPTH) & (depth <= reach + MAX_LOST)
    if max(depth[found].sum(), reach[found].sum()) > catalog.chunks + MAX_PARTS:
        return np.zeros(len(catalog), bool)
    return np.asarray(found)


def concat(parts: Sequence[Catalog]) -> Catalog:
    """Concatenate catalogs over the same files; facts and objects are those of the first."""
    parts = [part for part in parts if len(part)] or list(parts[:1])
    head = parts[0]
    if len(parts) == 1:
        return head
    dims = max(part.shape.shape[1] for part in parts)
    strided = any(part.strides is not None for part in parts)
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in ("dtype", "ndim", "file", "start", "stop", "codec", "rank", "replica")
    }
    columns |= {
        name: np.concatenate([box.padded(getattr(part, name), dims, fill) for part in parts])
        for name, fill in (("shape", 1), ("offsets", 0), ("sizes", 1))
    }
    if strided:
        steps = (row_major(part.sizes) if part.strides is None else part.strides for part in parts)
        columns["strides"] = np.concatenate([box.padded(step, dims, 0) for step in steps])
    if any(part.inner is not None for part in parts):
        inners = (np.zeros(part.chunks, np.int64) if part.inner is None else part.inner for part in parts)
        columns["inner"] = np.concatenate(list(inners))
    counts = np.concatenate([np.diff(part.row_ptr) for part in parts])
    return replace(
        head,
        keys=[key for part in parts for key in part.keys],
        row_ptr=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        fqns=[fqn for part in parts for fqn in part.fqns or [None] * len(part)],
        roles=[role for part in parts for role in part.roles or ["other"] * len(part)],
        **columns,
    )


def views(catalog: Catalog, run: RunArgs) -> list[Catalog]:
    """Return catalogs of views of a catalog's tensors: other names of norms, q, k, v, experts."""
    known = set(catalog.keys)
    found = [_respelled(catalog, known), _qkv(catalog, run, known), *_expert_views(catalog, run, known)]
    return [replace(view, objects=ObjectTable(), views=None) for view in found if len(view)]


def renamed(catalog: Catalog, rows: Sequence[tuple[int, str, str]]) -> Catalog:
    """Return some tensors of a catalog under other names, given as ``(position, key, fqn)``."""
    narrow = catalog.take(np.array([tensor for tensor, _, _ in rows], np.int64))
    return replace(narrow, keys=[key for _, key, _ in rows], fqns=[fqn for _, _, fqn in rows])


def expert_names(key: str, expert: int) -> tuple[str, str]:
    """Return an expert's names in SequentialMLP and TEGroupedMLP, from the stack's key."""
    head, _, leaf = key.rpartition(".experts.")
    return f"{head}.local_experts.{expert}.{leaf}", f"{head}.{leaf}{expert}"


def _respelled(catalog: Catalog, known: set[str]) -> Catalog:
    rows = []
    for tensor, fqn in enumerate(catalog.fqns or ()):
        other = layout.respelled(fqn) if fqn is not None and "norm" in fqn else None
        if fqn is not None and other is not None:
            key = _with_fqn(catalog.keys[tensor], fqn, other)
            if key not in known:
                rows.append((tensor, key, other))
    return renamed(catalog, rows)


def _qkv(catalog: Catalog, run: RunArgs, known: set[str]) -> Catalog:
    """Return views of q, k and v if the rows' geometry is stored; older files order rows differently."""
    fused = [t for t, fqn in enumerate(catalog.fqns or ()) if fqn is not None and _QKV.fullmatch(fqn)]
    narrow = catalog.take(np.array(fused, np.int64))
    targets = []
    for tensor, fqn in enumerate(narrow.fqns or ()):
        shape = narrow.shape_of(tensor)
        rows = layout.qkv_rows(run, shape[0]) if shape else None
        match = _QKV.fullmatch(fqn or "")
        if rows is None or match is None:
            continue
        axes, rest, zeros = tuple(range(len(shape))), shape[1:], (0,) * (len(shape) - 1)
        for side in "qkv":
            mine = [row for row in rows if row[0] == side]
            name = f"{match[1]}{side}{match[2]}"
            key = _with_fqn(narrow.keys[tensor], str(fqn), name)
            pieces = [ComposedBox(tensor, (a, *zeros), (n, *rest), (at, *zeros), axes) for _, a, n, at in mine]
            if key not in known:
                height = sum(n for _, _, n, _ in mine)
                targets.append(Composition(key, (height, *rest), pieces, name, (narrow.roles or [])[tensor]))
    return compose(narrow, targets)


def _expert_views(catalog: Catalog, run: RunArgs, known: set[str]) -> list[Catalog]:
    """Return single experts of stacks under their names in the run's modules, and stacks of single experts.

    A million chunks of experts are shown under one name, not under every spelling.
    """
    spelled = _grouped if run.args.get("moe_grouped_gemm") else _sequential
    fqns = catalog.fqns or []
    stacks = [t for t, fqn in enumerate(fqns) if fqn is not None and _STACKED_EXPERTS.fullmatch(fqn)]
    found: list[Catalog] = []
    narrow = catalog.take(np.array([t for t in stacks if catalog.ndim[t] >= 2], np.int64))
    narrow = narrow.take(np.flatnonzero(cuttable(narrow, np.ones(len(narrow), bool))))
    if len(narrow):
        roles = np.repeat(np.array(narrow.roles, object), narrow.shape[:, 0]).tolist()
        cut = unstack(narrow, np.ones(len(narrow), bool), spelled)
        names: list[str | None] = []
        for fqn, key, n in zip(narrow.fqns or (), narrow.keys, narrow.shape[:, 0].tolist(), strict=True):
            prefix = len(key) - len(str(fqn))
            names += [name[prefix:] for name in cut.keys[len(names) : len(names) + n]]
        found.append(replace(cut, fqns=names, roles=roles))
    groups: dict[tuple[str, str], dict[int, int]] = {}  # (key, fqn) of a stack that is not stored → its experts
    for tensor, fqn in enumerate(fqns):
        match = _ONE_EXPERT.fullmatch(fqn) if fqn is not None and ".experts." in fqn else None
        if match is not None and catalog.ndim[tensor]:
            stack = f"{match[1]}experts.{match[3] or match[4]}"
            expert = int(match[2] or match[5])
            groups.setdefault((_with_fqn(catalog.keys[tensor], str(fqn), stack), stack), {})[expert] = tensor
    targets, singles = [], []
    for (key, stack), members in groups.items():
        shapes = {catalog.shape_of(t) for t in members.values()}
        if key in known or sorted(members) != list(range(len(members))) or len(shapes) > 1:
            continue
        shape = shapes.pop()
        axes, zeros = (None, *range(len(shape))), (0,) * len(shape)
        pieces = [ComposedBox(t, zeros, shape, (e, *zeros), axes) for e, t in members.items()]
        role = (catalog.roles or [])[next(iter(members.values()))]
        targets.append(Composition(key, (len(members), *shape), pieces, stack, role))
        for e, t in members.items():
            name = next(name for name in expert_names(stack, e) if name != fqns[t])
            singles.append((t, _with_fqn(key, stack, name), name))
    if targets:
        found += [compose(catalog, targets), renamed(catalog, singles)]
    return found


def _sequential(key: str, expert: int) -> str:
    return expert_names(key, expert)[0]


def _grouped(key: str, expert: int) -> str:
    return expert_names(key, expert)[1]


def _with_fqn(key: str, fqn: str, other: str) -> str:
    """Replace the fqn in a key: ``optimizer.state.exp_avg.FQN`` → ``optimizer.state.exp_avg.OTHER``."""
    return key.removesuffix(fqn) + other


def _shifted(columns: Array, cut: Array, fill: int) -> Array:
    """Remove the first column of the rows marked in ``cut``."""
    moved = np.empty_like(columns)
    moved[:, :-1], moved[:, -1] = columns[:, 1:], fill
    kept = np.flatnonzero(~cut)
    moved[kept] = columns[kept]
    return moved


def _trimmed(catalog: Catalog) -> Catalog:
    """Remove padding dimensions that no tensor uses."""
    dims = max(1, int(catalog.ndim.max(initial=0)))
    assert catalog.strides is not None
    wide = ("shape", "offsets", "sizes")
    columns: dict[str, Any] = {name: np.ascontiguousarray(getattr(catalog, name)[:, :dims]) for name in wide}
    inner = catalog.inner if catalog.inner is not None and catalog.inner.any() else None
    return replace(catalog, **columns, strides=np.ascontiguousarray(catalog.strides[:, :dims]), inner=inner)
