"""Every tensor's placement, and the mesh inferred from all of them together.

The mesh is the one stored in the files, or else inferred from the boxes: ranks hold pieces in an order that only some
meshes produce. If ranks take turns in a save without copies (HSDP), tensors with equal cuts are pooled: ranks 0 and 1
wrote the halves of some, 2 and 3 those of others, so pieces repeat along an outer axis.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from workbench import formats
from workbench.analysis.layout import digits
from workbench.analysis.layout.coverage import Coverage
from workbench.analysis.layout.fit import ShardingPattern
from workbench.analysis.layout.holders import Holders
from workbench.analysis.layout.place import divided, index_of, place
from workbench.analysis.layout.placed import PROVEN, UNKNOWN, InferredMesh, Placed
from workbench.analysis.layout.sharding_patterns import ragged, sharding_patterns
from workbench.analysis.layout.simple import Ground, Table, called, flat_roles, put_flat, put_singles
from workbench.checkpoint import Checkpoint
from workbench.core.arrays import Ints


@dataclass(frozen=True, eq=False)
class Inferred:
    """Placements by tensor.

    Attributes:
        of_tensor: ``(T,)`` index into ``placed``.
        placed: the distinct placements.
        mesh: of the checkpoint; without axes if it cannot be inferred.
        places: ``(H, axes)`` coordinates of each holder on ``mesh``, -1 if unknown.
    """

    of_tensor: Ints
    placed: list[Placed]
    mesh: InferredMesh
    places: Ints
    source: str  #: the source of the mesh, as text


def infer(ckpt: Checkpoint, who: Holders, covered: Coverage) -> Inferred:
    """Infer the placements of all tensors of a checkpoint."""
    catalog = ckpt.catalog
    table = Table(len(catalog))
    for tensor, kind, why in _broken(covered):
        table.put([tensor], Placed(kind, UNKNOWN, why, copies=(0, 1)))
    empty = np.flatnonzero((catalog.numel == 0) & table.open)
    table.put(empty, Placed("empty", PROVEN, "it has no elements", copies=(0, 0)))
    single = (np.diff(catalog.row_ptr) == 1) & table.open
    flat = ragged(catalog, who, np.flatnonzero(table.open & ~single))
    found = sharding_patterns(catalog, who, np.flatnonzero(table.open & ~single & ~flat))
    several = [] if catalog.meta.get("flat_parameters") else [pattern for pattern, _ in found]
    mesh, places, source = _mesh(who, several, sum(len(one) for _, one in found), ckpt.world_size)
    ground = Ground(who, mesh, places)
    record = formats.record(ckpt.format)
    never = mesh.axes if flat_roles(ckpt) and mesh.axes == ("ranks",) else record.never_cuts
    allowed = [axis for axis, name in enumerate(mesh.axes) if name not in never]
    buffers = bool(flat.any() or flat_roles(ckpt) or record.never_cuts)
    experts = _experts(ckpt, who)
    of_experts = np.array([experts is not None and ".experts." in key for key in catalog.keys], bool)
    if experts is not None and of_experts.any():
        source = f"{source}; experts on {experts.mesh}"
    for pattern, tensors in found:
        dense = [tensor for tensor in tensors if not of_experts[tensor]]
        if len(dense):
            placed = _place(pattern, ground, allowed, ckpt.world_size, record.stores_parts)
            table.put(dense, placed if buffers else _downgraded(pattern, placed))
        if experts is not None and len(dense) < len(tensors):
            rows = list(pattern.holders)
            cutting = [experts.mesh.axes.index(axis) for axis in ("ep", "etp")]
            placed = place(pattern, experts.mesh, experts.places[rows], cutting, called(who, rows), parts=True)
            table.put([tensor for tensor in tensors if of_experts[tensor]], placed)
    put_flat(table, catalog, ground, np.flatnonzero(flat & ~of_experts))
    if experts is not None:
        put_flat(table, catalog, experts, np.flatnonzero(flat & of_experts))
    put_singles(table, ckpt, ground, np.flatnonzero(single))
    return Inferred(table.of_tensor, table.placed, mesh, places, source)


def _experts(ckpt: Checkpoint, who: Holders) -> Ground | None:
    """Return the mesh of experts if it differs from that of the other tensors: Megatron's, with ep.

    ::

        rank 0 1 2 3 4 5 6 7      tp=2, dp=4 for the rest of the model; etp=1, ep=4, edp=2 for experts:
        ep   0 1 2 3 0 1 2 3      etp fastest, then ep, edp, pp; with use_tp_pp_dp_mapping pp before edp
    """
    stated = ckpt.mesh.get("axes")
    sizes = {axis: size for axis, size in stated.items() if type(size) is int} if isinstance(stated, Mapping) else {}
    ep, pp = sizes.get("ep", 1), sizes.get("pp", 1)
    if not formats.record(ckpt.format).experts_apart or ep < 2 or "ep" in who.axes or not who.source:
        return None
    dense = sizes.get("tp", 0) * sizes.get("cp", 1) * sizes.get("dp", 0)
    etp = sizes.get("etp", sizes.get("tp", 1))
    if not dense or dense % (etp * ep):
        return None
    inner, edp = etp * ep, dense // (etp * ep)
    stage = who.coordinates[:, list(who.axes).index("pp")] if "pp" in who.axes else np.zeros(len(who), np.int64)
    rest, ranked = who.rank // inner, (who.coordinates >= 0).all(axis=1)
    for at, copy in ((rest // edp, rest % edp), (rest % pp, rest // pp)):
        if (at == stage)[ranked].all():
            places = np.stack([at, copy, who.rank // etp % ep, who.rank % etp], axis=1).astype(np.int64)
            places[~ranked] = -1
            return Ground(who, InferredMesh(("pp", "edp", "ep", "etp"), (pp, edp, ep, etp)), places)
    return None


def _downgraded(pattern: ShardingPattern, placed: Placed) -> Placed:
    """Downgrade flat ranges of whole rows without other evidence: uneven shards look the same."""
    if placed.kind != "flat" or max(map(len, pattern.boxes)) > 1:
        return placed
    why = f"{placed.cut}, in the order of their holders: a flat buffer, or shards along unknown axes"
    return Placed("irregular", UNKNOWN, why, cut=placed.cut, pieces=placed.pieces, copies=placed.copies)


def _broken(covered: Coverage) -> list[tuple[int, str, str]]:
    """Return tensors with holes or overlaps, and the fault of each."""
    twice = dict.fromkeys((tensor for tensor, *_ in covered.overlaps), "elements are stored in two different chunks")
    holes = dict.fromkeys((tensor for tensor, *_ in covered.holes), "elements are stored in no chunk")
    tangled = dict.fromkeys(covered.tangled, "its chunks have more overlaps or holes than can be checked")
    return [(t, "hole", why) for t, why in (holes | tangled).items()] + [
        (t, "overlap", why) for t, why in twice.items() if t not in holes and t not in tangled
    ]


# ---- the mesh --------------------------------------------------------------------------------------------------------


def _mesh(
    who: Holders, patterns: Sequence[ShardingPattern], tensors: int, world: int | None
) -> tuple[InferredMesh, Ints, str]:
    """Return the mesh of a checkpoint, the coordinates of its holders, and their source."""
    if who.source:
        return InferredMesh(tuple(who.axes), tuple(who.axes.values()), False), who.coordinates, who.source
    no_places = np.full((len(who), 0), -1, np.int64)
    if not who.ranked:
        return InferredMesh(), no_places, "no ranks are stored"
    ranks = max(world or 0, int(who.rank.max()) + 1)
    proven = [own for pattern in patterns if (own := _proven_mesh(pattern, who, ranks)) is not None]
    sizes = digits.refine([*proven, *_pooled(patterns, who, ranks)], ranks)
    source = (
        f"boxes of {tensors:,} tensors and their writers" if proven or len(sizes) > 1 else "only the writers' ranks"
    )
    return _numbered(sizes or (1,)), digits.coordinates(who.rank, sizes or (1,)), source


def _numbered(sizes: tuple[int, ...]) -> InferredMesh:
    """Return a mesh whose axes have no names."""
    return InferredMesh(
        ("ranks",) if len(sizes) == 1 else tuple(f"axis{number}" for number in range(len(sizes))), sizes
    )


def _proven_mesh(pattern: ShardingPattern, who: Holders, world: int) -> tuple[int, ...] | None:
    """Return the mesh proven by one sharding pattern in which every rank holds a part."""
    ranks = who.rank[list(pattern.holders)]
    if len(ranks) != world or len(set(ranks.tolist())) != world or not all(pattern.boxes):
        return None
    order = np.argsort(ranks)
    index = index_of(pattern)
    sizes = None if index is None else digits.radices(index[order])
    for mesh in digits.finer(sizes) if sizes else ():
        found = place(pattern, _numbered(mesh), digits.coordinates(ranks, mesh), range(len(mesh)), "")
        if found.status == PROVEN and found.kind in ("grid", "whole"):
            return mesh
    return None


def _pooled(patterns: Sequence[ShardingPattern], who: Holders, world: int) -> list[tuple[int, ...]]:
    """Return meshes proven jointly by tensors with equal cuts, if each rank always wrote the same piece."""
    pools: dict[tuple[int, ...], dict[int, tuple[int, ...]]] = defaultdict(dict)
    spoilt = set()
    for pattern in patterns:
        index = index_of(pattern)
        if index is None or not index.any():
            continue
        counts = tuple((index.max(axis=0) + 1).tolist())
        kept = index[:, index.max(axis=0) > 0]
        for rank, at in zip(who.rank[list(pattern.holders)].tolist(), map(tuple, kept.tolist()), strict=True):
            if pools[counts].setdefault(rank, at) != at:
                spoilt.add(counts)
    found = []
    for counts, pool in pools.items():
        if counts not in spoilt and len(pool) == world:
            sizes = digits.radices(np.array([pool[rank] for rank in range(world)], np.int64))
            found += [sizes] if sizes else []
    return found


# ---- placements ------------------------------------------------------------------------------------------------------


def _place(pattern: ShardingPattern, ground: Ground, allowed: Sequence[int], world: int | None, parts: bool) -> Placed:
    who, mesh, rows = ground.who, ground.mesh, list(pattern.holders)
    known = called(who, rows)
    if not mesh.axes:
        cut, pieces, copies = divided(pattern)
        kind = "whole" if pieces == 1 else "grid"
        return Placed(kind, UNKNOWN, f"{cut}; no ranks are stored", cut=cut, pieces=pieces, copies=copies)
    found = place(pattern, mesh, ground.places[rows], allowed, known, parts=parts)
    if not who.ranked or (found.status != UNKNOWN and found.kind != "flat"):
        return found
    own = (
        None if len(allowed) < len(mesh.axes) else _proven_mesh(pattern, who, max(world or 0, int(who.rank.max()) + 1))
    )
    if own is not None and own != mesh.shape:
        names = ("all",) if len(own) == 1 else tuple(f"own{number}" for number in range(len(own)))
        other = place(
            pattern, InferredMesh(names, own), digits.coordinates(who.rank[rows], own), range(len(own)), known
        )
        if other.status == PROVEN and other.kind == "grid":
            return replace(other, why=f"{other.why}, on a separate mesh ({other.mesh})")
    return found
