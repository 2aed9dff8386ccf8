"""DeepSpeed's universal checkpoints: one folder per parameter, independent of ranks.

::

    run/  latest_universal                       "global_step4_universal": written last
          global_step4_universal/
            mp_rank_00_model_states.pt           copied: module weights and facts, as in reader.py
            zero/optimizer_state.pt              common state; for stage 3 also rank 0's flat state, redundant
            zero/h.0.fc1.weight/fp32.pt          stages 1, 2: {"cat_dim": 0, "param": T (256, 64)}
                               /exp_avg.pt       stage 3: T (16384,), shaped by param_shapes of the model_states
                               /exp_avg_sq.pt
                               /step.pt          T ()

Keys as in reader.py: ``fp32.<name>`` (role ``master``), ``exp_avg.<name>`` …, ``step.<name>``, ``module.<name>``.
Read from deepspeed 0.19.8 (``checkpoint/ds_to_universal.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from workbench.core import codecs
from workbench.core.build import CatalogBuilder
from workbench.core.catalog import Catalog
from workbench.core.lazymap import LazyMap
from workbench.core.pickles.standins import TensorRef
from workbench.core.place import Place
from workbench.core.words import plural
from workbench.errors import CorruptError, WorkbenchError
from workbench.formats import Format
from workbench.formats.deepspeed import reader as deepspeed
from workbench.formats.deepspeed.files import FileDecoder, Located, States
from workbench.formats.deepspeed.model import put
from workbench.formats.layered import parts
from workbench.names.roles import STATES

ZERO = "zero"
COMMON = "optimizer_state.pt"
MASTER = "fp32"


def detect(place: Place) -> bool:
    """Return whether ``zero/`` holds ``optimizer_state.pt`` or folders of parameters."""
    if place.file is not None or ZERO not in place.folders:
        return False
    try:
        inner = place.sub(ZERO)
        return COMMON in inner.files or any(f"{MASTER}.pt" in inner.sub(name).files for name in inner.folders[:2])
    except WorkbenchError:  # an unrelated folder of that name
        return False


def missing(place: Place) -> str:
    """Return whether the file that the conversion writes last is missing."""
    return "" if place.exists(f"{ZERO}/{COMMON}") else f"{COMMON} is missing"


def read_catalog(place: Place) -> Catalog:
    """Return the catalog of everything stored.

    Raises:
        CorruptError: a flat tensor's length does not match its parameter's shape; the message has both.
    """
    reader = deepspeed.FolderReader(place, "deepspeed_universal")
    reader.read_model()
    shapes = {
        name: shape for model in reader.models.values() for group in model.shapes or () for name, shape in group.items()
    }
    decoder = FileDecoder(place)
    found: dict[str, set[str]] = {}
    flat: list[str] = []
    for name, state, file in _files(place):
        states = decoder.read(file, any_tree=True)
        at = states.locate(_tensor(states), f"{state} of {name!r}")
        key = f"{state}.{name}"
        reader.builder.file(file, metadata=True, end=states.end)
        reader.names.setdefault((state, name), {})[-1] = key
        found.setdefault(name, set()).add(state)
        role = "master" if state == MASTER else STATES.get(state, "other")
        if isinstance(states.tree, TensorRef) and state != "step" and len(at.shape) == 1:
            if name not in shapes and at.shape[0] > 1:
                flat.append(name)
            _flat(reader.builder, key, at, shapes.get(name, at.shape), name, role)
        else:
            put(reader.builder, key, at, fqn=name, role=role)
    reader.notes += _notes(found, shapes, flat)
    return reader.finish()


def read_objects(place: Place, catalog: Catalog) -> Mapping[str, Any]:
    """Return the objects as in reader.py, and the common ``optimizer_state``."""
    stored = deepspeed.read_objects(place, catalog)
    makers = {name: partial(stored.__getitem__, name) for name in stored}
    if place.exists(f"{ZERO}/{COMMON}"):
        makers["optimizer_state"] = partial(parts.rest, place, f"{ZERO}/{COMMON}")
    return LazyMap(makers)


def _files(place: Place) -> Iterator[tuple[str, str, str]]:
    """Yield ``(parameter, state, file)`` for every file of every parameter."""
    inner = place.sub(ZERO)
    for name in inner.folders:
        for file in inner.sub(name).files:
            if file.endswith(".pt"):
                yield name, file.removesuffix(".pt"), f"{ZERO}/{name}/{file}"


def _tensor(states: States) -> TensorRef:
    tree = states.tree.get("param") if isinstance(states.tree, Mapping) else states.tree
    if not isinstance(tree, TensorRef):
        raise CorruptError(f"{states.file!r} holds neither a tensor nor a dict with a tensor as 'param'")
    return tree


def _flat(builder: CatalogBuilder, key: str, at: Located, shape: tuple[int, ...], fqn: str, role: str) -> None:
    """Declare a bare flat tensor in its parameter's shape."""
    count = 1
    for size in shape:
        count *= size
    if count != at.shape[0]:
        raise CorruptError(
            f"{at.file!r} has {plural(at.shape[0], 'element')}, but param_shapes has {shape}, "
            f"{plural(count, 'element')}; the parts of the folder are from different saves"
        )
    builder.tensor(key, at.dtype, shape, fqn=fqn, role=role)
    codec = codecs.RAW_BE if at.big else codecs.RAW
    builder.chunk(key, (0,) * len(shape), shape, at.file, at.start, at.stop, codec=codec, inner=at.inner)


def _notes(found: Mapping[str, set[str]], shapes: Mapping[str, tuple[int, ...]], flat: list[str]) -> list[str]:
    notes = []
    lost = [name for name in shapes if name not in found]
    if lost:
        notes.append(
            f"{plural(len(lost), 'parameter')} of param_shapes have no folder in {ZERO!r}, such as {lost[0]!r}"
        )
    most = set.union(*found.values()) if found else set()
    lacking = [name for name in found if name in shapes and found[name] != most]
    if lacking:
        missing = ", ".join(sorted(most - found[lacking[0]]))
        notes.append(
            f"{plural(len(lacking), 'parameter', 'lack')} states that others have, such as {lacking[0]!r}: {missing}"
        )
    if flat:
        names = list(dict.fromkeys(flat))
        notes.append(
            f"{plural(len(names), 'parameter', 'are')} stored flat and no file has their shapes, such as {names[0]!r}: "
            "copy the model_states files here"
        )
    return notes


FORMAT = Format(
    name="deepspeed_universal",
    title="DeepSpeed universal",
    marks="zero/NAME/fp32.pt",
    read_from="deepspeed 0.19",
    detect=detect,
    read_catalog=read_catalog,
    read_objects=read_objects,
    missing=missing,
    subfolders=("*",),
    framework="deepspeed",
)
