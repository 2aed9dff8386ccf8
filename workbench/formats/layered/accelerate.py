"""accelerate's ``save_state`` folder: model, optimizers and the loop's state in separate files or folders.

::

    pytorch_model_fsdp_0/   .metadata __R_0.distcp   DCP, keys model.<fqn>                     ┐ FSDP, sharded
    optimizer_0/            .metadata __R_0.distcp   DCP, keys optimizer.state.<fqn>.exp_avg   ┘
    model.safetensors │ pytorch_model.bin │ pytorch_model_fsdp.bin    or one file, or shards with an index
    optimizer.bin  optimizer_1.bin                   torch.save of the optimizer's state_dict
    scheduler.bin  sampler.bin  scaler.pt            objects
    random_states_R.pkl  custom_checkpoint_N.pkl     objects: one per rank; one per registered object

Keys are as stored; tensors of ``optimizer.bin`` get the prefix ``optimizer.``. Source: accelerate 1.15
``checkpointing.py``, ``utils/fsdp_utils.py``, ``utils/constants.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from operator import getitem
from typing import Any

from workbench import formats
from workbench.core.catalog import Catalog
from workbench.core.lazymap import LazyMap
from workbench.core.place import Place
from workbench.errors import IncompleteError
from workbench.formats import Format
from workbench.formats.layered import parts
from workbench.formats.safetensors.weight_index import missing_weights

_FOLDER = re.compile(r"(pytorch_model_fsdp|optimizer)_(\d+)")
_MODEL = re.compile(r"(?:model|pytorch_model|pytorch_model_fsdp)(?:_(\d+))?\.(?:safetensors|bin)")
_OPTIMIZER = re.compile(r"optimizer(?:_(\d+))?\.bin")
_STATE = re.compile(
    r"(?:scheduler|sampler|dl_state_dict)(?:_\d+)?\.bin|scaler\.pt|random_states_\d+\.pkl|custom_checkpoint_\d+\.pkl"
)
_RANDOM = re.compile(r"random_states_(\d+)\.pkl")


def detect(place: Place) -> bool:
    """Return whether the folder has generator states by rank, or FSDP's two DCP folders."""
    if place.file is not None:
        return False
    if any(_RANDOM.fullmatch(name) for name in place.files):
        return True
    return any(_FOLDER.fullmatch(name) and formats.reader("dcp").detect(place.sub(name)) for name in place.folders)


def missing(place: Place) -> str:
    """Describe what is missing of FSDP's folders, the generator states (written last) or the weights."""
    for folder in place.folders:
        if _FOLDER.fullmatch(folder) and (why := parts.missing_dcp(place, folder)):
            return why
    if not any(name.startswith("random_states_") for name in place.files):
        return "random_states_N.pkl is missing, which accelerate writes last"
    return missing_weights(place)


def read_catalog(place: Place) -> Catalog:
    """Return the catalog of all parts.

    Raises:
        IncompleteError: there are no weights, or a part's save was interrupted.
        OpenError: as the parts' readers raise.
    """
    notes: list[str] = []
    found: list[parts.Part] = []
    for name in place.folders:
        if match := _FOLDER.fullmatch(name):
            found.append(parts.folder(place, "dcp", name, match[1] == "optimizer"))
    if not any(not part.optimizer for part in found):
        found[:0] = _models(place)
    for name in place.files:
        if match := _OPTIMIZER.fullmatch(name):
            found.append(parts.file(place, name, f"optimizer_{match[1]}." if match[1] else "optimizer."))
    if not any(not part.optimizer for part in found):
        raise IncompleteError(
            f"{place.path!r} looks like accelerate's save_state but holds no weights (pytorch_model_fsdp_0/, "
            "model.safetensors, pytorch_model.bin); the save was interrupted, or the model was saved elsewhere"
        )
    if not any(part.optimizer for part in found):
        notes.append("no optimizer state (optimizer_0/ or optimizer.bin)")
    found += parts.averages(place)
    ranks = [int(match[1]) for name in place.files if (match := _RANDOM.fullmatch(name))]
    if not ranks:
        notes.append("random_states_R.pkl is missing, which accelerate writes last: the save may have been interrupted")
    return parts.combine("accelerate", place, found, notes, {"world_size": len(ranks) or None})


def read_objects(place: Place, catalog: Catalog) -> Mapping[str, Any]:
    """Return DCP's objects, and each state file by its stem: ``scheduler``, ``ema_model`` …"""
    stored = formats.reader("dcp").read_objects(place, catalog)
    makers: dict[str, Any] = {name: partial(getitem, stored, name) for name in stored}
    for name in place.files:
        if _STATE.fullmatch(name):
            makers[name.rpartition(".")[0]] = partial(parts.whole, place, name)
        elif _OPTIMIZER.fullmatch(name):
            makers[name.rpartition(".")[0]] = partial(parts.rest, place, name)
        elif name == "config.json":
            makers["config"] = partial(place.read_json, name)
    return LazyMap(makers | parts.average_objects(place))


def _models(place: Place) -> list[parts.Part]:
    several = [(name, match[1]) for name in place.files if (match := _MODEL.fullmatch(name))]
    if any(number for _, number in several):  # one file per model; names may repeat
        return [parts.file(place, name, f"model_{number}." if number else "", model=True) for name, number in several]
    if any(name == "pytorch_model_fsdp.bin" for name, _ in several):
        return [parts.file(place, "pytorch_model_fsdp.bin", "", model=True)]
    for format in ("safetensors", "torch_save"):
        if formats.reader(format).detect(place):
            return [parts.folder(place, format, "", False)]
    return []


FORMAT = Format(
    name="accelerate",
    title="accelerate save_state",
    marks="pytorch_model_fsdp_0/, optimizer_0/",
    read_from="accelerate 1.15",
    detect=detect,
    read_catalog=read_catalog,
    read_objects=read_objects,
    missing=missing,
    subfolders=("*",),
    numbered_saves=True,
)
