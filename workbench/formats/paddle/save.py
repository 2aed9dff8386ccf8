"""``paddle.save`` files: ``.pdparams``, ``.pdopt`` and others.

::

    model.pdparams   pickle of {structured name: array, …, "StructuredToParameterName@@": {structured: static}}
    model.pdopt      pickle of {static name + "_moment1_0": array, …, "LR_Scheduler": {…}, "master_weights": {…}}
    x.pdckpt         any tree; each tensor is the pair (static name, array)
    x.pdiparams      paddle's C++ layout (binary.py): tensors back to back, without names

A pickle has no header and no checksum. Numpy's types do not record every paddle type:

* bfloat16 is stored as numpy's ``uint16``. paddle reads every ``uint16`` as bfloat16 (it does not use the type
  otherwise), and so does this reader; a note counts them.
* float8 is stored as ``int8``. It cannot be distinguished from real ``int8``, so it stays ``int8``; a note says so.

An optimizer's file has static names of parameters. They are mapped through a table of the same process: the file's own,
or that of the ``.pdparams`` with the same name. Keys of a folder's optimizer get the prefix ``optimizer.``.
Source: paddlepaddle 3.3.1 ``framework/io.py``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

from workbench.core.build import CatalogBuilder
from workbench.core.catalog import Catalog
from workbench.core.dtypes import by_name
from workbench.core.lazymap import LazyMap
from workbench.core.place import Place
from workbench.core.source import LazyBytes
from workbench.core.words import plural
from workbench.errors import WorkbenchError
from workbench.formats import Format
from workbench.formats.paddle import binary as paddle_binary
from workbench.formats.paddle import names as paddle_names
from workbench.formats.paddle import tree as paddle_tree
from workbench.formats.paddle.pickle import DecodedPickle, load
from workbench.formats.paddle.tree import TABLE, Stored
from workbench.formats.torch.file import dotted

PARAMS, OPT, DENSE = ".pdparams", ".pdopt", ".pdmodel"  #: group_sharded calls a state dict .pdmodel
OPTIMIZER = "optimizer."  #: before the keys of a folder's .pdopt
STEPS = ("step", "global_step", "iteration")
MAX_LISTED = 200
TAIL = 1 << 16  #: bytes at a file's end that contain the name table of a flat state_dict
_TORCH = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19"  # torch.save's legacy magic number, pickled


def detect(place: Place) -> bool:
    """Return whether it is a file with paddle's suffix and beginning or its name table, or a folder of one model."""
    if place.file is None:
        return bool(_folder(place))
    try:
        size = place.stat(place.file).size
        head = place.read(place.file, length=min(64, size))
        if place.file.rpartition(".")[2].startswith("pd") and (not size or _is_pickle(head)):
            return True
        if paddle_binary.looks_like(head):
            return True
        return _is_pickle(head) and TABLE.encode() in place.read(place.file, start=max(0, size - TAIL))
    except WorkbenchError:  # not our format; its own reader reports what is wrong
        return False


def read_catalog(place: Place) -> Catalog:
    """Return the catalog of a file's tensors, or of a folder's model and optimizer.

    Raises:
        CorruptError, TruncatedError: the file is damaged or contradicts itself.
        UnsafeError: a bomb.
        UnsupportedFormatError: paddle's C++ layout has another version.
    """
    builder = CatalogBuilder("paddle_save", place)
    notes: list[str] = []
    files = _folder(place) if place.file is None else {place.file: ""}
    table: dict[str, str] = {}
    found: dict[str, tuple[str, Stored | None]] = {}
    facts: dict[str, Any] = {"step": None, "notes": notes, "objects": [], "foreign_globals": []}
    for file, prefix in files.items():
        builder.file(file, metadata=True)
        view = place.window(file)
        if paddle_binary.looks_like(bytes(view[:32])):
            found |= dict.fromkeys(_add_binary(builder, file, view, notes), (file, None))
            continue
        loaded = load(place, file)
        table = {**paddle_names.static_table(paddle_tree.names_of(loaded).items()), **table}
        for key, stored in _keyed(loaded, repr(file), notes).items():
            if paddle_tree.declare(builder, file, prefix + key, stored, notes):
                found[prefix + key] = file, stored
        _add_facts(facts, loaded, file, prefix, notes)
    if place.file is not None and place.file.endswith(OPT):
        table |= _beside(builder, place, place.file, notes)
    return _named(builder, found, table, facts, notes, bare=place.file is None or not place.file.endswith(OPT))


def read_objects(place: Place, catalog: Catalog) -> Mapping[str, Any]:
    """Return each tree's top level without its tensors, and the step inferred from powers of beta (``beta_pow``)."""
    makers: dict[str, Any] = {}

    @cache
    def whole(file: str) -> Any:
        return _top(paddle_tree.rest(load(place, file), repr(file)))

    for file, name, shown in catalog.meta.get("objects", []):
        makers[shown] = lambda file=file, name=name: whole(file)[name]
    if any(role in ("beta1_pow", "beta2_pow") for role in catalog.roles or []):
        powers = cache(partial(paddle_names.step_facts, place, catalog))
        makers["beta_pow"] = powers
        if not any(step in makers for step in STEPS):
            makers["step"] = lambda: (powers() or {}).get("step")
    return LazyMap(makers)


# ---- files ---------------------------------------------------------------------------------------------------------


def _folder(place: Place) -> dict[str, str]:
    """Return the files of a folder with exactly one model, and the prefix of their keys; otherwise nothing."""
    models = [name for name in place.files if name.endswith((PARAMS, DENSE)) and _begins_as_pickle(place, name)]
    optimizers = [name for name in place.files if name.endswith(OPT)]
    if len(models) != 1 or len(optimizers) > 1:
        return {}
    return {models[0]: "", **dict.fromkeys(optimizers, OPTIMIZER)}


def _begins_as_pickle(place: Place, name: str) -> bool:
    return name.endswith(PARAMS) or _is_pickle(place.head(name, 16))  # elsewhere, a .pdmodel is a program (protobuf)


def _is_pickle(head: bytes) -> bool:
    return len(head) > 2 and head[0] == 0x80 and 2 <= head[1] <= 5 and not head[2:].startswith(_TORCH)


def _beside(builder: CatalogBuilder, place: Place, file: str, notes: list[str]) -> dict[str, str]:
    """Return the name table of the model's file with the same name."""
    model = file.removesuffix(OPT) + PARAMS
    if not place.exists(model):
        notes.append(f"static names are not mapped to parameters: this needs {model!r} in the same folder")
        return {}
    try:
        loaded = load(place, model)
    except WorkbenchError as error:
        notes.append(f"static names are not mapped to parameters: {error}")
        return {}
    builder.file(model, metadata=True)
    notes.append(f"names of parameters are from {model!r} in the same folder")
    return paddle_names.static_table(paddle_tree.names_of(loaded).items())


# ---- tensors -------------------------------------------------------------------------------------------------------


def _keyed(loaded: DecodedPickle, what: str, notes: list[str]) -> dict[str, Stored]:
    """Return tensors by dotted path; repeated paths get ``#2``, ``#3`` … in the tree's order."""
    found = paddle_tree.tensors(loaded, what)
    return dict(zip(dotted([stored.path for stored in found], notes), found, strict=True))


def _add_binary(builder: CatalogBuilder, file: str, view: LazyBytes, notes: list[str]) -> list[str]:
    found = paddle_binary.parse(view, repr(file))
    keys = ["tensor"] if len(found) == 1 else [f"tensor.{number}" for number in range(len(found))]
    for key, tensor in zip(keys, found, strict=True):
        builder.tensor(key, tensor.dtype, tensor.shape)
        builder.chunk(key, (0,) * len(tensor.shape), tensor.shape, file, tensor.start, tensor.stop)
    notes.append(f"{file!r} has paddle's C++ layout, which stores no names")
    return keys


def _named(
    builder: CatalogBuilder,
    found: Mapping[str, tuple[str, Stored | None]],
    table: Mapping[str, str],
    facts: dict[str, Any],
    notes: list[str],
    *,
    bare: bool,
) -> Catalog:
    """Return the catalog with fqns and roles; ``bare``: names that are in no table may be parameters."""
    trees = {key: stored for key, (_, stored) in found.items() if stored is not None}
    keys = list(trees)
    # the prefix of a folder's optimizer is not part of its paths
    paths = {key: stored.path for key, stored in trees.items()}
    structured = {name: static for static, name in table.items()}
    statics = {key: stored.static or structured.get(key) for key, stored in trees.items()}
    fqns, roles = paddle_names.resolve(keys, paths, statics, table)
    named = dict(zip(keys, zip(fqns, roles, strict=True), strict=True))
    if not bare:
        named = {
            key: (fqn if role != "param" else None, "other" if role == "param" else role)
            for key, (fqn, role) in named.items()
        }
    if facts["step"] is None and any(role in ("beta1_pow", "beta2_pow") for role in roles):
        notes.append("no step is stored: the one shown is inferred from powers of beta, with assumed betas")
    catalog = builder.build({**facts, "aliases": _aliases(found)[:MAX_LISTED]})
    halves = int((catalog.dtype == by_name("bfloat16").code).sum())
    if halves and trees:
        notes.append(f"{plural(halves, 'tensor', 'are')} stored as uint16 and shown as bfloat16, as in paddle")
    if (catalog.dtype == by_name("int8").code).any() and trees:
        notes.append("paddle stores float8 as int8: whether the int8 tensors were float8 is unknown")
    return replace(
        catalog,
        fqns=[named.get(key, (None, ""))[0] for key in catalog.keys],
        roles=[named.get(key, (None, "other"))[1] for key in catalog.keys],
    )


def _aliases(found: Mapping[str, tuple[str, Stored | None]]) -> list[list[str]]:
    """Return groups of keys of the same array, which a pickle stores only once."""
    groups: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for key, (file, stored) in found.items():
        if stored is not None and (span := stored.pieces[0].span).stop > span.start:
            groups[file, span.start, stored.shape].append(key)
    return [keys for keys in groups.values() if len(keys) > 1]


# ---- the rest ------------------------------------------------------------------------------------------------------


def _add_facts(facts: dict[str, Any], loaded: DecodedPickle, file: str, prefix: str, notes: list[str]) -> None:
    kept = _top(paddle_tree.rest(loaded, repr(file)))
    facts["objects"] += [[file, name, prefix + name] for name in kept if type(name) is str]
    facts["foreign_globals"] += sorted(loaded.globals)[:MAX_LISTED]
    if "builtins.eval" in loaded.globals:
        notes.append(
            f"{file!r} calls builtins.eval in a way that paddle never does: it is hostile. Nothing was run; do not "
            "load it with paddle or pickle"
        )
    step = next((kept[name] for name in STEPS if type(kept.get(name)) is int), None)
    facts["step"] = step if facts["step"] is None else facts["step"]


def _top(kept: object) -> dict[Any, Any]:
    if isinstance(kept, dict):
        return kept
    return {} if kept is None else {"value": kept}


FORMAT = Format(
    name="paddle_save",
    title="paddle.save",
    marks=".pdparams, .pdopt, …",
    read_from="paddlepaddle 3.3",
    detect=detect,
    read_catalog=read_catalog,
    read_objects=read_objects,
    single_file=True,
    suffixes=(".pdparams", ".pdopt", ".pdckpt"),
    framework="paddle",
)
