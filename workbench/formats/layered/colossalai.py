"""Colossal-AI's booster: a folder of weights, one of optimizer states, and what the trainer writes beside them.

::

    epoch-0_step-6/
      modeling/   pytorch_model.bin.index.json  pytorch_model-00001.bin …       or model.safetensors.index.json …
      optimizer/  pytorch_optim.bin.index.json  {"metadata": {"param_groups": "pytorch_optim_group.bin", …},
                                                 "weight_map": {"0": "pytorch_optim-00001.bin", …}}
                  pytorch_optim-00001.bin       {0: {"step", "exp_avg", "exp_avg_sq"}, …}
                  pytorch_optim_group.bin       [{"params": [0, 1, …], "lr": …}]
                  optimizer-00001.safetensors   asynchronous saves: state.0.exp_avg; optimizer.safetensors.index.json
      lr_scheduler  running_states.json         objects

The caller of the booster names the folders, so the index of the optimizer decides. Weights and states are whole:
ranks of tensor parallelism are gathered, and stages of a pipeline have files of their own
(``…-stage-00001-shard-00002.bin``).

Ids are those of ``optimizer.param_groups``. The index lists weights in the order in which the model registered them,
so they are joined as those of a ``torch.save`` file. ``running_states.json`` counts steps within an epoch; it is the
step of the run only in epoch 0.

Source: Colossal-AI 0.5 (``checkpoint_io/general_checkpoint_io.py``, ``hybrid_parallel_checkpoint_io.py``, ``utils.py``,
``utils/safetensors.py``; ``applications/Colossal-LLaMA``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from workbench import formats
from workbench.core.build import merge
from workbench.core.catalog import Catalog
from workbench.core.dtypes import by_name
from workbench.core.lazymap import LazyMap
from workbench.core.place import Place
from workbench.errors import CorruptError, NotACheckpointError, WorkbenchError
from workbench.formats import Format
from workbench.formats.layered import parts
from workbench.formats.safetensors.weight_index import (
    WeightIndex,
    check_files,
    missing_of_index,
    missing_weights,
    read_index,
)

INDEX = "pytorch_optim.bin.index.json"
ASYNC_INDEX = "optimizer.safetensors.index.json"
GROUPS = b'"param_groups"'  #: in the index of an asynchronous save, whose name PaddleNLP uses as well
STATES = "running_states.json"
SCHEDULER = "lr_scheduler"
_PICKLED = by_name("uint8").code
LOOKED = 16  #: folders that are looked into
_WEIGHTS = re.compile(r"(?:model\.safetensors|pytorch_model\.bin)\.index\.json")


def detect(place: Place) -> bool:
    """Return whether the folder, or one in it, has the index of an optimizer."""
    return place.file is None and _optimizer(place) is not None


def missing(place: Place) -> str:
    """Describe files that an index lists and that are missing."""
    optimizer, model = _optimizer(place), _model(place)
    for folder, what in ((model, missing_weights), (optimizer, _missing_states)):
        if folder is not None and (why := what(place.sub(folder) if folder else place)):
            return f"{folder}: {why}" if folder else why
    return "" if model is not None or not optimizer else "there are no weights beside the optimizer"


def read_catalog(place: Place) -> Catalog:
    """Return the catalog of weights and optimizer states.

    Raises:
        CorruptError: an index contradicts its files.
        NotACheckpointError: no folder has the index of an optimizer.
        OpenError: as the parts' readers raise.
    """
    optimizer, model = _optimizer(place), _model(place)
    if optimizer is None:
        raise NotACheckpointError(f"{place.path!r} holds no {INDEX}, neither itself nor in one of its folders")
    found = [parts.folder(place, *_weights(place, model), False)] if model is not None else []
    notes = [] if found else ["there are no weights beside the optimizer: its parameters have numbers, not names"]
    found.append(_states(place, optimizer))
    order = _order(place.sub(model) if model else place) if model is not None else None
    catalog = parts.combine("colossalai", place, found, notes, {"step": stored_step(place)}, order=order)
    roles = [
        "other" if role == "step" and dtype == _PICKLED else role  # of an asynchronous save: a number, pickled
        for role, dtype in zip(catalog.roles or (), catalog.dtype.tolist(), strict=True)
    ]
    catalog = replace(catalog, roles=roles)
    for name in (STATES, SCHEDULER):
        if name in place.files:
            catalog.metadata_files.append(name)
    catalog.metadata_files.append(f"{optimizer}/{_index(place, optimizer)}".removeprefix("/"))
    return catalog


def read_objects(place: Place, catalog: Catalog) -> Mapping[str, Any]:
    """Return ``running_states``, ``lr_scheduler``, ``param_groups`` of the optimizer, and the model's configs."""
    makers: dict[str, Any] = {}
    if STATES in place.files:
        makers[STATES.removesuffix(".json")] = partial(place.read_json, STATES)
    if SCHEDULER in place.files:
        makers[SCHEDULER] = partial(parts.whole, place, SCHEDULER)
    optimizer, model = _optimizer(place), _model(place)
    if optimizer is not None:
        inner = place.sub(optimizer) if optimizer else place
        makers["param_groups"] = partial(_groups, inner, read_index(inner, _index(place, optimizer)))
    inner = place.sub(model) if model else place
    for name in inner.files if model is not None else ():
        if name.endswith("config.json"):
            makers[name.removesuffix(".json")] = partial(inner.read_json, name)
    return LazyMap(makers)


def stored_step(place: Place) -> int | None:
    """Return the step of ``running_states.json`` in the first epoch; later ones begin at 0 again."""
    stored = place.read_json(STATES) if STATES in place.files else None
    step = stored.get("step") if isinstance(stored, dict) and stored.get("epoch") == 0 else None
    return step if type(step) is int else None


def _index(place: Place, folder: str) -> str:
    return INDEX if INDEX in (place.sub(folder) if folder else place).files else ASYNC_INDEX


def _optimizer(place: Place) -> str | None:
    """Return the folder with the optimizer's index; empty for the place itself."""
    for folder in ("", *place.folders[:LOOKED]):
        if folder and place.is_link(folder):
            continue
        try:
            inner = place.sub(folder) if folder else place
            if INDEX in inner.files or (ASYNC_INDEX in inner.files and GROUPS in inner.read(ASYNC_INDEX)):
                return folder
        except WorkbenchError:  # no permission
            continue
    return None


def _model(place: Place) -> str | None:
    """Return the folder with the weights or their index; empty for the place itself."""
    for folder in ("", *place.folders[:LOOKED]):
        if folder and place.is_link(folder):
            continue
        files = (place.sub(folder) if folder else place).files
        if any(_WEIGHTS.fullmatch(name) for name in files) or {"model.safetensors", "pytorch_model.bin"} & set(files):
            return folder
    return None


def _weights(place: Place, folder: str) -> tuple[str, str]:
    files = (place.sub(folder) if folder else place).files
    return "safetensors" if any(name.startswith("model.safetensors") for name in files) else "torch_save", folder


def _order(model: Place) -> list[str] | None:
    """Return the weights in the order of the model; ``None`` if they are in one file."""
    name = next((name for name in model.files if _WEIGHTS.fullmatch(name)), None)
    if name is None:
        return None
    weights = read_index(model, name).weights
    return sorted(weights, key=weights.__getitem__)  # the indices of a pipeline's stages are merged in any order


def _states(place: Place, folder: str) -> parts.Part:
    """Merge the optimizer's files into one part."""
    inner = place.sub(folder) if folder else place
    index = read_index(inner, _index(place, folder))
    check_files(inner, index)
    found, flat = [], index.name == ASYNC_INDEX
    for file in index.files:
        catalog = formats.reader("safetensors" if flat else "torch_save").read_catalog(inner.sub(file))
        ids = {key.split(".")[1 if flat else 0] for key in catalog.keys if "." in key}
        lost = [number for number, where in index.weights.items() if where == file and number not in ids]
        if lost and (flat or not set(lost) <= set(formats.reader("torch_save").read_objects(inner.sub(file), catalog))):
            raise CorruptError(f"index {index.name!r} maps the state of {lost[0]!r} to {file!r}, which lacks it")
        found.append(("" if flat else "state.", "", catalog))
    merged = merge("colossalai", found, {"notes": [note for *_, one in found for note in one.meta.get("notes", [])]})
    groups = _groups(inner, index)
    return parts.Part("optimizer.", folder, merged, True, groups if isinstance(groups, list) else None)


def _groups(inner: Place, index: WeightIndex) -> Any:
    """Read the optimizer's ``param_groups`` from the file that the index names."""
    facts = index.facts.get("metadata")
    name = facts.get("param_groups") if isinstance(facts, dict) else None
    return parts.rest(inner, name) if isinstance(name, str) and inner.exists(name) else None


def _missing_states(inner: Place) -> str:
    name = INDEX if INDEX in inner.files else ASYNC_INDEX
    index = read_index(inner, name)
    facts = index.facts.get("metadata")
    group = facts.get("param_groups") if isinstance(facts, dict) else None
    if isinstance(group, str) and not inner.exists(group):
        return f"{group!r}, which has the optimizer's param_groups, is missing"
    return missing_of_index(inner, name)


FORMAT = Format(
    name="colossalai",
    title="Colossal-AI booster",
    marks="FOLDER/pytorch_optim.bin.index.json",
    read_from="Colossal-AI 0.5",
    detect=detect,
    read_catalog=read_catalog,
    read_objects=read_objects,
    missing=missing,
    stored_step=stored_step,
    subfolders=("*",),
    framework="torch",
)
