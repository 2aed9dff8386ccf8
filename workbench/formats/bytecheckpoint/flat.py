"""FSDP1's flat parameters, unflattened by arithmetic (ByteCheckpoint's ``save_decomposed_model_optimizer=True``).

::

    model/      layers.0._flat_param   │ wq │ wk │▒│ norm │     one 1-D tensor per wrapped module; ▒ is padding
                rank 0 ────────────────┤    ├──── rank 1        each rank stores one range of it
    optimizer/  state.layers.0._flat_param.exp_avg              one range per rank and parameter; no padding; nothing
                                                                for frozen or unregistered parameters
    model/.metadata user_defined_dict (the optimizer's own is empty)
        fsdp_flat_param_to_fqns    {flat key: [name relative to the module, …]}       padding has no name
        fsdp_numels_with_padding   {flat key: (64, 4096, 3, …)}     fsdp_is_padding_mask   {flat key: [F, F, T, …]}
        fsdp_shapes                {flat key: [(64,), (64, 64), …]}

A range ``[a, b)`` of a flat tensor intersects a parameter in a range of that parameter's elements. This range is up to
``2·D − 1`` boxes (`core.box.flat_ranges`), each contiguous in the file. Padding belongs to no parameter and is skipped.

Read from bytecheckpoint 0.0.2 (``planner/fsdp/fsdp_hack.py``, ``utilities/ckpt_format/fsdp_ckpt_utils.py``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from workbench.core import box
from workbench.core import catalog as cat
from workbench.core.arrays import Ints
from workbench.core.build import CatalogBuilder
from workbench.core.catalog import Catalog, ObjectTable
from workbench.core.dtypes import ITEMSIZE, by_code
from workbench.core.pickles.standins import short
from workbench.core.place import Place
from workbench.core.words import plural
from workbench.errors import CorruptError

FLAT = "_flat_param"
NUMEL = "fsdp_optimizer_requires_grad_numel"  #: an int64 stored with the moments: their number of elements
NAMES, MASK, NUMELS, SHAPES = (
    "fsdp_flat_param_to_fqns",
    "fsdp_is_padding_mask",
    "fsdp_numels_with_padding",
    "fsdp_shapes",
)
_WRAPPER = re.compile(r"(?<![^.])(?:_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.")


@dataclass(frozen=True, eq=False)
class FlatParam:
    """One flat parameter: its parameters, where each starts, and its length in elements, including padding."""

    key: str
    numel: int
    names: list[str]
    shapes: list[tuple[int, ...]]
    start: list[int]

    @property
    def padding(self) -> int:
        """Number of elements that belong to no parameter."""
        return self.numel - sum(int(np.prod(shape, dtype=np.int64)) for shape in self.shapes)


@dataclass(frozen=True, eq=False)
class Unflattened:
    """A catalog with parameters in place of flat tensors (which become views), and the path of each key.

    ``without`` lists parameters without state in the flat tensors: frozen, or not passed to the optimizer.
    """

    catalog: Catalog
    paths: dict[str, tuple[str, ...]]
    without: list[str]


def tables(user: Mapping[str, Any], what: str) -> dict[str, FlatParam]:
    """Return the flat parameters by key (without wrapper names), from a model part's ``user_defined_dict``.

    Raises:
        CorruptError: its dictionaries contradict each other; the message has the flat key and the numbers.
    """
    roles = user.get("model_dict_keys")
    if isinstance(roles, (list, tuple)):  # several models in one state dict
        found: dict[str, FlatParam] = {}
        for role in roles:
            inner = user.get(role)
            if isinstance(inner, dict):
                found |= {f"{role}.{key}": _prefixed(flat, f"{role}.") for key, flat in tables(inner, what).items()}
        return found
    parts = [user.get(name) for name in (NAMES, MASK, NUMELS, SHAPES)]
    if all(part is None for part in parts):
        return {}
    if not all(isinstance(part, dict) for part in parts):
        raise CorruptError(f"{what}: user_defined_dict has some of FSDP's dictionaries of flat parameters, but not all")
    out: dict[str, FlatParam] = {}
    for key in parts[0]:  # type: ignore[union-attr]
        row = [part.get(key) for part in parts]  # type: ignore[union-attr]
        if type(key) is not str or not all(isinstance(value, (list, tuple)) for value in row):
            raise CorruptError(f"{what}: the dictionaries of the flat parameter {short(key, 80)} are incomplete")
        out[clean(key)] = _table(key, *row, what=what)
    return out


def clean(name: str) -> str:
    """Return a module's or parameter's name without the names of module wrappers."""
    return _WRAPPER.sub("", name)


def unflatten(place: Place, catalog: Catalog, flats: Mapping[str, FlatParam], *, state: bool) -> Unflattened:
    """Replace the flat tensors of one part's catalog by their parameters; ``state`` is set for the optimizer's part.

    Raises:
        CorruptError: the length of a flat tensor differs from the one in the model part.
    """
    chosen = _flat_tensors(catalog, flats, state)
    if not chosen:
        return Unflattened(catalog, {}, [])
    catalog.check()  # check before cutting: afterwards a range no longer refers to its item
    _check_one_piece(catalog, chosen)
    builder = CatalogBuilder(catalog.format, place, files={name: i for i, name in enumerate(catalog.files)})
    others = np.array([t for t in range(len(catalog)) if t not in chosen], np.int64)
    _carry(builder, catalog.take(others))
    paths, without = _cut(builder, catalog, chosen, state)
    narrow = catalog.take(np.array(list(chosen), np.int64))
    views = replace(narrow, fqns=None, roles=None, objects=ObjectTable(), views=None)
    made = builder.build(catalog.meta)
    made = replace(made, metadata_files=catalog.metadata_files, objects=catalog.objects, views=views)
    return Unflattened(made, paths, without)


def _table(key: str, names: Any, mask: Any, numels: Any, shapes: Any, *, what: str) -> FlatParam:
    who = f"{what}: flat parameter {short(key, 80)}"
    if len(mask) != len(numels) or any(type(n) is not int or n < 0 for n in numels):
        raise CorruptError(f"{who} has {plural(len(numels), 'length')} and {plural(len(mask), 'padding flag')}")
    ends = np.cumsum(np.array([0, *numels], np.float64))
    real = [i for i, padding in enumerate(mask) if not padding]
    if len(names) != len(real) or len(shapes) != len(real) or ends[-1] > cat.MAX_ELEMENTS:
        raise CorruptError(
            f"{who} has {plural(len(real), 'parameter')}, but {len(names)} names and {plural(len(shapes), 'shape')}"
        )
    if not all(type(name) is str for name in names) or not all(_is_shape(shape) for shape in shapes):
        raise CorruptError(f"{who} has an invalid name or shape")
    for i, name, shape in zip(real, names, shapes, strict=True):
        volume = int(np.prod(shape, dtype=np.float64))
        if volume != numels[i]:
            raise CorruptError(
                f"{who}: {name!r} of shape {tuple(shape)} needs {plural(volume, 'element')}, not {numels[i]:,}"
            )
    prefix = clean(key).removesuffix(FLAT)
    # a wrapped module names its own parameters ".weight"; saves before 0.0.2 repeat the prefix
    relative = [clean(name).lstrip(".") for name in names]
    whole = bool(prefix) and all(name.startswith(prefix) for name in relative)
    return FlatParam(
        key=clean(key),
        numel=int(ends[-1]),
        names=relative if whole else [prefix + name for name in relative],
        shapes=[tuple(shape) for shape in shapes],
        start=[int(ends[i]) for i in real],
    )


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, (tuple, list)) and all(type(n) is int and 0 <= n < 1 << 55 for n in shape)


def _prefixed(flat: FlatParam, prefix: str) -> FlatParam:
    return replace(flat, key=prefix + flat.key, names=[prefix + name for name in flat.names])


def _flat_tensors(catalog: Catalog, flats: Mapping[str, FlatParam], state: bool) -> dict[int, tuple[FlatParam, str]]:
    """Return the positions of flat tensors, each with its table and the state's name (empty for weights)."""
    found: dict[int, tuple[FlatParam, str]] = {}
    for t, key in enumerate(catalog.keys):
        name, leaf = key, ""
        if state:
            name, dot, leaf = key.removeprefix("state.").rpartition(".")
            if not key.startswith("state.") or not dot or leaf == NUMEL:
                continue
        flat = flats.get(clean(name)) if name.endswith(FLAT) else None
        if flat is None or catalog.ndim[t] != 1:
            continue
        length = int(catalog.shape[t, 0])
        if length != flat.numel:
            raise CorruptError(
                f"tensor {key!r} has {plural(length, 'element')}, but the model part's dictionary adds up to "
                f"{flat.numel:,}; the parts are from different saves"
            )
        found[t] = flat, leaf
    return found


def _check_one_piece(catalog: Catalog, chosen: Mapping[int, Any]) -> None:
    if catalog.strides is None:
        return
    rows = np.flatnonzero(np.isin(catalog.tensor, list(chosen)))
    strided = rows[(catalog.strides[rows, 0] != 1) & (catalog.sizes[rows, 0] > 1)]
    if len(strided):
        row = int(strided[0])
        raise CorruptError(
            f"tensor {catalog.keys[catalog.tensor[row]]!r}: its range from {int(catalog.offsets[row, 0]):,} is stored "
            f"with a stride of {int(catalog.strides[row, 0])}, which no flat parameter has"
        )


def _carry(builder: CatalogBuilder, catalog: Catalog) -> None:
    """Copy the tensors that are not flat, unchanged."""
    ids = [builder.tensor(key, catalog.dtype_of(t), catalog.shape_of(t)) for t, key in enumerate(catalog.keys)]
    builder.block(
        np.array(ids, np.int64)[catalog.tensor],
        catalog.offsets,
        catalog.sizes,
        catalog.file,
        catalog.start,
        catalog.stop,
        codec=catalog.codec,
        rank=catalog.rank,
        inner=0 if catalog.inner is None else catalog.inner,
        strides=catalog.strides,
    )


def _cut(
    builder: CatalogBuilder, catalog: Catalog, chosen: Mapping[int, tuple[FlatParam, str]], state: bool
) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """Declare the parameters and their boxes. Return their paths, and the names of those without state."""
    owner: list[int] = []
    low: list[int] = []
    shapes: list[tuple[int, ...]] = []
    names: list[tuple[str, str]] = []
    for t, (flat, leaf) in chosen.items():
        owner += [t] * len(flat.names)
        low += flat.start
        shapes += flat.shapes
        names += [(name, leaf) for name in flat.names]
    dims = max([1, *map(len, shapes)])
    shape = np.array([(*s, *([1] * (dims - len(s)))) for s in shapes], np.int64).reshape(len(shapes), dims)
    begin, volume = np.array(low, np.int64)[:, None], box.volume(shape)[:, None]
    rows = np.flatnonzero(np.isin(catalog.tensor, list(chosen)))
    stored = catalog.tensor[rows], catalog.offsets[rows, :1], catalog.sizes[rows, :1]
    segment, at = box.group_join(np.array(owner, np.int64), begin, volume, *stored)
    row = rows[at]
    # undeclared parameters must not widen the block
    width = int(np.array([len(s) for s in shapes], np.int64)[segment].max(initial=1))
    low_, extent = box.intersect(begin[segment], volume[segment], catalog.offsets[row, :1], catalog.sizes[row, :1])
    first = (low_ - begin[segment])[:, 0]  # in the parameter's own elements
    into = (low_ - catalog.offsets[row, :1])[:, 0]  # in the stored range's

    has = np.zeros(len(names), bool)
    has[segment] = True
    ids, paths, without = _declare(builder, catalog, owner, names, shapes, has, state)

    index, offsets, sizes, flat_at = box.flat_ranges(shape[segment], first, first + extent[:, 0])
    row, item = row[index], ITEMSIZE[catalog.dtype[catalog.tensor[row[index]]]]
    inner = 0 if catalog.inner is None else catalog.inner[row]
    start = catalog.start[row] + inner + (into[index] + flat_at - first[index]) * item
    builder.block(
        ids[segment[index]],
        offsets[:, :width],
        sizes[:, :width],
        catalog.file[row],
        start,
        start + box.volume(sizes) * item,
        codec=catalog.codec[row],
        rank=catalog.rank[row],
    )
    return paths, without


def _declare(
    builder: CatalogBuilder,
    catalog: Catalog,
    owner: list[int],
    names: list[tuple[str, str]],
    shapes: list[tuple[int, ...]],
    has: Any,
    state: bool,
) -> tuple[Ints, dict[str, tuple[str, ...]], list[str]]:
    ids = np.full(len(names), -1, np.int64)
    paths: dict[str, tuple[str, ...]] = {}
    without: dict[str, None] = {}
    known = {names[position][0] for position in np.flatnonzero(has).tolist()}
    for position, (name, leaf) in enumerate(names):
        # no element in any state and no step: not a hole, but a parameter that the optimizer never had
        if state and name not in known and 0 not in shapes[position] and f"state.{name}.step" not in catalog.index:
            without[name] = None
            continue
        key = f"state.{name}.{leaf}" if state else name
        paths[key] = ("state", name, leaf) if state else (name,)
        ids[position] = builder.tensor(key, by_code(int(catalog.dtype[owner[position]])), shapes[position])
    return ids, paths, list(without)
