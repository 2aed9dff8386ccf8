"""Module weights, buffers and frozen parameters: everything except the flat partitions.

::

    mp_rank_00_model_states.pt   module {"wte.weight": T, …}                 → module.wte.weight      param
                                 buffer_names ["mask"]                       → module.mask            buffer
                                 frozen_param_fragments {"emb.weight": T}    copies of the module's: left out
                                 shared_params {"head.weight": "wte.weight"} → views
                                 tensors of the client state                 → client.<path>          other
    zero_pp_rank_R_…             module: placeholders of shape (0,), buffers, persistent parameters: replicas
                                 frozen_param_fragments: rank R's piece, ceil(numel / ranks) elements

Read from deepspeed 0.19.8 (``runtime/engine.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from workbench.core import codecs
from workbench.core.build import CatalogBuilder
from workbench.core.pickles.standins import TensorRef
from workbench.core.place import Place
from workbench.core.words import some_of
from workbench.errors import CorruptError, IncompleteError
from workbench.formats.deepspeed import flat
from workbench.formats.deepspeed.files import FileDecoder, Located, States, items, tensors
from workbench.formats.deepspeed.names import Folder
from workbench.names.roles import resolve

Key = Callable[[str, str], str]
OWN = {
    "module",
    "buffer_names",
    "optimizer",
    "param_shapes",
    "frozen_param_shapes",
    "shared_params",
    "frozen_param_fragments",
    "lr_scheduler",
    "data_sampler",
    "random_ltd",
    "sparse_tensor_module_names",
    "skipped_steps",
    "global_steps",
    "global_samples",
    "dp_world_size",
    "mp_world_size",
    "checkpoint_parallel_dimensions",
    "ds_config",
    "ds_version",
}


@dataclass
class ModelStates:
    """Contents of the model_states of one model-parallel rank.

    Attributes:
        shapes: ``param_shapes``, one dict of name → shape per group; ``None`` if not stored (no ZeRO).
        shared: alias → owner.
        keys: stored key of each module tensor by name.
        params: shape of the module's parameters by name, in its order.
        facts: the plain values at the top level of the first file.
        optimizer: the optimizer's tensors by path, if this file stores them (stage 0).
    """

    mp: int
    file: str
    shapes: list[dict[str, tuple[int, ...]]] | None = None
    shared: dict[str, str] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    params: dict[str, tuple[int, ...]] = field(default_factory=dict)
    facts: Mapping[Any, Any] = field(default_factory=dict)
    optimizer: list[tuple[tuple[Any, ...], Located]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def add_model(
    builder: CatalogBuilder, place: Place, folder: Folder, mp: int, stage3: bool, dp: int, key: Key, rank: bool
) -> ModelStates:
    """Declare the tensors of one model-parallel rank's model_states.

    Args:
        dp: number of data-parallel ranks by the optimizer files; 0 without them (then by the model_states).
        key: ``(state, name)`` → stored key. rank: whether the data-parallel rank is the rank of the job.

    Raises:
        IncompleteError: there is no model_states file; names and shapes are stored nowhere else.
        CorruptError: the files contradict each other.
    """
    files = folder.model_files(mp, stage3)
    if not files:
        raise IncompleteError(
            f"the model_states file of mp_rank {mp:02d} is missing; without it, the names and shapes of parameters are "
            "unknown: copy it here or save again"
        )
    decoder = FileDecoder(place)
    model: ModelStates | None = None
    frozen: dict[str, dict[int, Located]] = {}
    odd: list[str] = []
    wanted: list[_Wanted] = []
    for r, file in files:
        if stage3 and r is not None and dp and r >= dp:
            continue  # left over from a save with more ranks; a note on the optimizer says so
        states = decoder.read(file)
        builder.file(file, metadata=True, end=states.end)
        if model is None:
            model = _head(states, mp)
        elif not states.same:
            odd += _differences(model, states)
        if not states.same or not wanted:
            wanted = [*_module(model, states, key, stage3), *_client(states), *_fragments(states)]
        label = "" if len(files) == 1 and len(folder.mp_ranks()) == 1 else file.removesuffix("_model_states.pt") + "."
        for kind, name, ref, fqn, role in wanted:
            at = states.locate(ref, f"tensor {name!r}")
            if kind == "frozen":
                frozen.setdefault(name, {})[r or 0] = at
                continue
            stored = key("module", name) if kind == "module" else f"client.{label}{name}"
            put(builder, stored, at, fqn=fqn, role=role, rank=(r or 0) if rank else -1)
    if model is None:
        raise IncompleteError(
            f"no model_states file of mp_rank {mp:02d} belongs to the {dp} ranks of its optimizer files"
        )
    if stage3 and not dp:  # converted to universal: no optimizer files, unchanged fragments
        stated = model.facts.get("dp_world_size")
        dp = stated if type(stated) is int and 0 < stated <= 1 << 20 else len(files)
    if odd:
        model.notes.append(f"{len(odd)} model_states files are from another step than {model.file!r}: {odd[0]}")
    _frozen(builder, model, frozen, dp if stage3 else 0, key, rank)
    return model


def add_tensors(builder: CatalogBuilder, states: States, prefix: str, key: Callable[[str], str]) -> None:
    """Declare the tensors of a plain dict file (a pipeline layer, an expert) under ``prefix`` and their names."""
    builder.file(states.file, metadata=True, end=states.end)
    named = {prefix + str(name): ref for name, ref in states.tree.items() if isinstance(ref, TensorRef)}
    for name, (fqn, role) in _meaning(named, set()).items():
        put(builder, key(name), states.locate(named[name], f"tensor {name!r}"), fqn=fqn, role=role)


def put(builder: CatalogBuilder, key: str, at: Located, *, fqn: str | None, role: str, rank: int = -1) -> None:
    """Declare one complete tensor and its byte range."""
    builder.tensor(key, at.dtype, at.shape, fqn=fqn, role=role)
    builder.chunk(
        key,
        (0,) * len(at.shape),
        at.shape,
        at.file,
        at.start,
        at.stop,
        codec=codecs.RAW_BE if at.big else codecs.RAW,
        rank=rank,
        inner=at.inner,
        strides=at.stride if 0 not in at.shape else None,
    )


def _head(states: States, mp: int) -> ModelStates:
    tree = states.tree
    if "module" not in tree:
        raise CorruptError(f"{states.file!r} has no 'module', so it is not a model_states file of DeepSpeed")
    shapes = tree.get("param_shapes")
    groups = shapes if isinstance(shapes, (list, tuple)) else None if shapes is None else [shapes]
    model = ModelStates(mp, states.file, None if groups is None else [_shapes(states, group) for group in groups])
    shared = tree.get("shared_params")
    if isinstance(shared, Mapping):
        model.shared = {str(alias): str(owner) for alias, owner in shared.items()}
    model.facts = {str(k): v for k, v in tree.items() if k not in ("module", "param_shapes", "frozen_param_fragments")}
    if isinstance(tree.get("optimizer"), Mapping):
        found = tensors(tree["optimizer"])
        model.optimizer = [(path, states.locate(ref, f"optimizer.{path}")) for path, ref in found]
    return model


def _shapes(states: States, group: object) -> dict[str, tuple[int, ...]]:
    if not isinstance(group, Mapping):
        raise CorruptError(f"{states.file!r}: param_shapes is not a list of dicts from name to shape")
    for name, shape in group.items():
        if type(name) is not str or not isinstance(shape, tuple) or any(type(n) is not int or n < 0 for n in shape):
            raise CorruptError(f"{states.file!r}: param_shapes has the invalid entry {name!r:.80}: {shape!r:.80}")
    return {name: tuple(shape) for name, shape in group.items()}


def _differences(model: ModelStates, states: States) -> list[str]:
    """Describe how another rank's file differs. Shapes must agree, as they locate every rank's bytes."""
    other = _head(states, model.mp)
    if other.shapes != model.shapes:
        raise CorruptError(
            f"{states.file!r} and {model.file!r} have different param_shapes; the files are from different saves"
        )
    mine, theirs = model.facts.get("global_steps"), other.facts.get("global_steps")
    return [] if mine == theirs else [f"{states.file!r} has step {theirs!r:.20}, not {mine!r:.20}"]


#: kind, name, where, fqn, role of a tensor that every rank's file of the same pickle holds
_Wanted = tuple[str, str, TensorRef, str | None, str]


def _module(model: ModelStates, states: States, key: Key, stage3: bool) -> Iterator[_Wanted]:
    module = states.tree["module"]
    if not isinstance(module, Mapping):
        return  # pipelines write None here, and one file per layer
    named: dict[str, TensorRef] = {}
    for path, ref in tensors(module):  # Megatron-DeepSpeed nests: {"language_model": {"encoder": {…}}}
        name = ".".join(map(str, path))
        if name in named:
            raise CorruptError(f"{states.file!r}: two tensors of the module have the name {name!r:.120}")
        named[name] = ref
    buffers = {str(name) for name in items(states.tree.get("buffer_names"))}
    shapes = {name: shape for group in model.shapes or () for name, shape in group.items()}
    seen: dict[tuple[Any, ...], str] = {}
    for name, (fqn, role) in _meaning(named, buffers).items():
        ref = named[name]
        if stage3 and ref.shape == (0,) and name not in buffers and shapes.get(name, (1,)) != (0,):
            continue  # a placeholder: the weights are in the optimizer's partitions
        view = (ref.storage.key, ref.storage_offset, ref.shape, ref.stride)
        if model.shared.get(name) is not None and seen.get(view) == model.shared[name]:
            continue  # shares the bytes of its owner; becomes a view of it
        seen[view] = name
        if name in shapes and ref.shape != shapes[name]:
            raise CorruptError(
                f"{states.file!r}: the module's {name!r} has shape {ref.shape}, but param_shapes has {shapes[name]}"
            )
        model.keys[name] = key("module", name)
        if role == "param":
            model.params[name] = ref.shape
        yield "module", name, ref, fqn, role


def _meaning(names: Mapping[str, Any], buffers: set[str]) -> dict[str, tuple[str | None, str]]:
    """Return fqn and role of the module's tensors: DeepSpeed lists the buffers; the names are the model's own."""
    keys = list(names)
    fqns, roles = resolve(keys, {"paths": {name: ("module", name) for name in keys}})
    return {
        name: (name, "buffer") if name in buffers else (name if role in ("param", "buffer") else fqn, role)
        for name, fqn, role in zip(keys, fqns, roles, strict=True)
    }


def _client(states: States) -> Iterator[_Wanted]:
    """Yield tensors of the client state (such as generator states), separately for each rank."""
    for name, value in states.tree.items():
        if name not in OWN:
            for path, ref in tensors(value, (name,)):
                yield "client", ".".join(map(str, path)), ref, None, "other"


def _fragments(states: States) -> Iterator[_Wanted]:
    found = states.tree.get("frozen_param_fragments")
    if isinstance(found, Mapping):
        yield from (("frozen", str(n), ref, str(n), "param") for n, ref in found.items() if isinstance(ref, TensorRef))


def _frozen(
    builder: CatalogBuilder,
    model: ModelStates,
    found: Mapping[str, Mapping[int, Located]],
    dp: int,
    key: Key,
    rank: bool,
) -> None:
    """Add frozen parameters: a second copy of the module's (stages 0 to 2), or every rank's piece (stage 3)."""
    shapes = _shapes_of(model.facts.get("frozen_param_shapes"))
    for name in found:
        if name not in shapes:
            raise CorruptError(f"{model.file!r}: frozen parameter {name!r} has a fragment but no shape")
    if dp:
        _pieces(builder, model, found, shapes, dp, key, rank)
    for name, parts in found.items():
        at = parts[min(parts)]
        if name not in model.keys:
            if at.shape != shapes[name]:
                raise CorruptError(
                    f"{at.file!r}: frozen parameter {name!r} has shape {at.shape}, but {shapes[name]} in "
                    "frozen_param_shapes"
                )
            model.keys[name] = key("module", name)
            put(builder, model.keys[name], at, fqn=name, role="param", rank=min(parts) if rank else -1)


def _pieces(
    builder: CatalogBuilder,
    model: ModelStates,
    found: Mapping[str, Mapping[int, Located]],
    shapes: Mapping[str, tuple[int, ...]],
    dp: int,
    key: Key,
    rank: bool,
) -> None:
    """Add every rank's piece of every frozen parameter: ``ceil(numel / ranks)`` elements, padding at the end."""
    names = list(found)
    if not names:
        return
    numel = flat.counted(names, [shapes[name] for name in names])
    piece = -(-numel // dp)
    table = {column: np.zeros((len(names), dp), np.int64) for column in ("file", "start", "stop", "inner")}
    present = np.zeros((len(names), dp), bool)
    position = np.empty(len(names), np.int64)
    for row, name in enumerate(names):
        first = found[name][min(found[name])]
        model.keys[name] = key("module", name)
        position[row] = builder.tensor(model.keys[name], first.dtype, shapes[name], fqn=name, role="param")
        for r, at in found[name].items():
            if at.shape != (int(piece[row]),) or (at.dtype, at.big) != (first.dtype, first.big):
                raise CorruptError(
                    f"{at.file!r}: the fragment of frozen parameter {name!r} is {at.dtype} {at.shape}; for "
                    f"{shapes[name]} over {dp} ranks it should be {first.dtype} ({int(piece[row]):,},)"
                )
            present[row, r] = True
            values = {"file": builder.file(at.file), "start": at.start, "stop": at.stop, "inner": at.inner}
            for column, value in values.items():
                table[column][row, r] = value
    start = np.minimum(piece[:, None] * np.arange(dp), numel[:, None])
    stop = np.minimum(start + piece[:, None], numel[:, None])
    param, owner = np.nonzero(present & (stop > start))
    zero = np.zeros(len(param), np.int64)
    ranges = flat.Ranges(param, owner, param, zero, start[param, owner], stop[param, owner])
    size = np.array([found[name][min(found[name])].dtype.itemsize for name in names], np.int64)
    big = np.array([found[name][min(found[name])].big for name in names])
    for made in flat.boxes(ranges, [shapes[name] for name in names]):
        at_ = (made.param, made.rank)
        builder.block(
            position[made.param],
            made.offsets,
            made.sizes,
            table["file"][at_],
            table["start"][at_],
            table["stop"][at_],
            codec=np.where(big[made.param], codecs.RAW_BE, codecs.RAW),
            rank=made.rank if rank else -1,
            inner=table["inner"][at_] + made.at * size[made.param],
        )
    lost = np.flatnonzero(~present.all(axis=0))
    if len(lost):
        model.notes.append(f"frozen parameters lack the pieces of ranks {some_of(lost.tolist(), 8)}: they are holes")


def _shapes_of(stored: object) -> dict[str, tuple[int, ...]]:
    if not isinstance(stored, Mapping):
        return {}
    return {str(n): tuple(s) for n, s in stored.items() if isinstance(s, tuple) and all(type(i) is int for i in s)}
