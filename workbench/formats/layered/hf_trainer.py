"""Hugging Face Trainer's ``checkpoint-N``: weights, optimizer and the loop's state in separate files.

::

    checkpoint-6/
      trainer_state.json                   global_step, epoch, log_history
      model.safetensors │ …index.json      weights under their stored names; or adapter_model.safetensors (PEFT),
                                           pytorch_model.bin, DCP in pytorch_model_fsdp_0/, or pieces of ranks in
                                           shard-0000R-model-…safetensors
      optimizer.pt │ optimizer.bin         {"state": {0: {"step", "exp_avg", "exp_avg_sq"}}, "param_groups": [decay,
                                           no decay]}: integer ids without names; or DCP in optimizer_0/
                                           or (save_optimizer_distributed) in optimizer/
      scheduler.pt  scaler.pt              objects
      rng_state.pth │ rng_state_R.pth      objects, one per rank
      training_args.bin                    a pickled TrainingArguments, shown as an inert record

``trainer_state.json`` may be missing: ``optimizer.pt`` beside such weights has its layout. Keys of
the optimizer's file get the prefix ``optimizer.``. Ids are mapped to parameters only if that is certain, which is
rare with safetensors' sorted names. Source: transformers 5.23 ``trainer.py``, ``trainer_pt_utils.py``.
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
from workbench.errors import CorruptError, IncompleteError
from workbench.formats import Format
from workbench.formats.layered import parts
from workbench.formats.safetensors.weight_index import missing_weights

STATE = "trainer_state.json"
_WEIGHTS = re.compile(r"(?:model|adapter_model)\.safetensors(?:\.index\.json)?|pytorch_model\.bin(?:\.index\.json)?")
#: The optimizer's state; a loop with several of them may write a list.
OPTIMIZERS = ("optimizer.pt", "optimizer.bin", "optimizers.pt")
_LOOP = re.compile(r"optimizer\.(?:pt|bin)|scheduler\.pt|rng_state(?:_\d+)?\.pth")
_STATES = re.compile(r"schedulers?\.pt|scaler\.pt|rng_state(?:_\d+)?\.pth|training_args\.bin")
_RNG = re.compile(r"rng_state_(\d+)\.pth")
_STEP_FOLDER = re.compile(r"checkpoint-\d+")
FSDP, FSDP_OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"
SHARDED_OPTIMIZER = "optimizer"  #: of ``save_optimizer_distributed``, beside ``shard-…`` weights


def detect(place: Place) -> bool:
    """Return whether a folder with ``trainer_state.json`` is a checkpoint, not just the parent of checkpoints; or has
    the Trainer's weights and optimizer without it."""
    if place.file is not None:
        return False
    if STATE not in place.files:
        return "optimizer.pt" in place.files and any(_WEIGHTS.fullmatch(name) for name in place.files)
    if _weights(place) is not None or any(_LOOP.fullmatch(name) for name in place.files):
        return True
    return not any(_STEP_FOLDER.fullmatch(name) for name in place.folders)


def missing(place: Place) -> str:
    """Describe missing weight files, as counted by names and an index."""
    if FSDP in place.folders:
        return parts.missing_dcp(place, FSDP)
    if SHARDED_OPTIMIZER in place.folders and (why := parts.missing_dcp(place, SHARDED_OPTIMIZER)):
        return why
    kinds = ("model", "adapter_model", "pytorch_model", "shard-")
    if not any(name.startswith(kinds) and name.endswith((".safetensors", ".bin", ".json")) for name in place.files):
        return "there are no weight files"
    return missing_weights(place)


def read_catalog(place: Place) -> Catalog:
    """Return the catalog of weights and optimizer state.

    Raises:
        IncompleteError: there are no weights.
        OpenError: as the parts' readers raise.
    """
    state = place.read_json(STATE) if STATE in place.files else {}
    if not isinstance(state, dict):
        raise CorruptError(f"{STATE!r} is a JSON {type(state).__name__}, not the Trainer's record")
    weights = _weights(place)
    if weights is None:
        raise IncompleteError(
            f"{place.path!r} has {STATE!r} but no weights (model.safetensors, pytorch_model.bin, "
            f"adapter_model.safetensors or {FSDP}/); the save was interrupted, or they were moved"
        )
    notes: list[str] = []
    if STATE not in place.files:
        notes.append(f"no {STATE}: the step is taken from the folder's name, and the Trainer cannot resume from here")
    found = [parts.folder(place, weights, FSDP if weights == "dcp" else "", False)]
    for name in (FSDP_OPTIMIZER, SHARDED_OPTIMIZER):
        if name in place.folders:
            found.append(parts.folder(place, "dcp", name, True))
    if len(found) == 1:
        found += [parts.file(place, name, f"{stem}.") for stem, name in _optimizers(place).items()]
    if not any(part.optimizer for part in found):
        notes.append("no optimizer state (optimizer.pt): a resume from here silently resets the optimizer")
    found += parts.averages(place)
    if "scheduler.pt" not in place.files:
        notes.append("no scheduler.pt: a resume from here silently restarts the learning rate schedule")
    notes += [f"{name!r} is DeepSpeed's part, which is not included" for name in place.folders if "global_step" in name]
    step = state.get("global_step")
    ranks = {int(match[1]) for name in place.files if (match := _RNG.fullmatch(name))}
    world = len(ranks) or (1 if "rng_state.pth" in place.files else None)
    facts = {"step": step if type(step) is int else None, "world_size": world}
    catalog = parts.combine("hf_trainer", place, found, notes, facts)
    if STATE in place.files:
        catalog.metadata_files.append(STATE)
    return catalog


def read_objects(place: Place, catalog: Catalog) -> Mapping[str, Any]:
    """Return ``trainer_state``, ``scheduler``, ``rng_state``, ``training_args``, ``optimizer`` (groups), configs,
    and what files of averages store beside the weights."""
    makers: dict[str, Any] = {}
    for name in place.files:
        stem = name.rpartition(".")[0]
        if name == STATE or (name.endswith(".json") and "config" in name):
            makers[stem] = partial(place.read_json, name)
        elif _STATES.fullmatch(name):
            makers[stem] = partial(parts.whole, place, name)
    makers |= {stem: partial(parts.rest, place, name) for stem, name in _optimizers(place).items()}
    makers |= parts.average_objects(place)
    stored = formats.reader("dcp").read_objects(place, catalog)
    return LazyMap({**makers, **{name: partial(getitem, stored, name) for name in stored}})


def _optimizers(place: Place) -> dict[str, str]:
    """Return the files of the optimizer's state by stem; of two with one stem, the one that the Trainer loads."""
    return {name.rpartition(".")[0]: name for name in reversed(OPTIMIZERS) if name in place.files}


def _weights(place: Place) -> str | None:
    """Return the format of the weights, or ``None`` if there are none."""
    if FSDP in place.folders:
        return "dcp"
    return next((format for format in ("safetensors", "torch_save") if formats.reader(format).detect(place)), None)


FORMAT = Format(
    name="hf_trainer",
    title="Hugging Face Trainer checkpoint-N",
    marks="trainer_state.json, or optimizer.pt beside the weights",
    read_from="transformers 5.23",
    detect=detect,
    read_catalog=read_catalog,
    read_objects=read_objects,
    missing=missing,
    stored_step=parts.trainer_step,
    subfolders=("*",),
    saved_together=("optimizer.pt", "scheduler.pt", ("optimizer", "pytorch_model_fsdp", "global_step")),
    framework="hf",
)
