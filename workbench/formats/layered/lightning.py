"""Lightning checkpoints: a ``torch.save`` file with a fixed top level, or a DCP folder with a file for the rest.

::

    epoch=3-step=100.ckpt     file: {"epoch", "global_step", "pytorch-lightning_version", "state_dict": {fqn: T},
                                     "optimizer_states": [{"state": {0: …}, "param_groups": […]}], "lr_schedulers",
                                     "loops", "callbacks", "hyper_parameters"}
    epoch=3-step=100.ckpt/    folder (FSDP, ModelParallel): .metadata  __R_0.distcp  meta.pt
                              keys: state_dict.<fqn>, optimizer_0.state.<fqn>.exp_avg; meta.pt: the rest

The fqn is the name inside ``state_dict``: the LightningModule's, so it may itself begin with ``model.``.

Source: lightning 2.6 ``trainer/connectors/checkpoint_connector.py``, ``strategies/fsdp.py``,
``strategies/model_parallel.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from operator import getitem
from typing import Any

from workbench import formats
from workbench.core.catalog import Catalog
from workbench.core.lazymap import LazyMap
from workbench.core.place import Place
from workbench.core.words import plural
from workbench.formats import Format

META = "meta.pt"
MARK = b"pytorch-lightning_version"
HEAD = 1 << 20  #: bytes that contain a file's mark: the first record of the archive is the tree


def detect(place: Place) -> bool:
    """Return whether it is a DCP folder with ``meta.pt``, or a ``torch.save`` file with Lightning's version."""
    if place.file is None:
        return META in place.files and formats.reader("dcp").detect(place)
    head = place.head(place.file, HEAD)
    return len(head) >= 512 and MARK in head and formats.reader("torch_save").detect(place)


def missing(place: Place) -> str:
    """Describe what DCP's files lack, or that ``meta.pt`` is missing."""
    if place.file is not None:
        return formats.reader("torch_save").missing(place)
    return formats.reader("dcp").missing(place) or ("" if META in place.files else f"{META} is missing")


def read_catalog(place: Place) -> Catalog:
    """Return the catalog of the file, or of the folder's DCP part; raises what their readers raise."""
    if place.file is not None:
        return replace(formats.reader("torch_save").read_catalog(place), format="lightning")
    model = formats.reader("dcp").read_catalog(place)
    rest = formats.reader("torch_save").read_catalog(place.sub(META))
    facts = {**model.meta, "step": rest.meta["step"], "objects": rest.meta["objects"]}
    extra = [key for key in rest.keys if key not in model.index]
    if extra:
        facts["notes"] = [*facts.get("notes", []), f"{plural(len(extra), 'tensor')} of {META!r} are not listed"]
    return replace(model, format="lightning", metadata_files=[*model.metadata_files, META], meta=facts)


def read_objects(place: Place, catalog: Catalog) -> Mapping[str, Any]:
    """Return the top level without its tensors; for a folder, the objects of DCP and ``meta.pt``."""
    if place.file is not None:
        return formats.reader("torch_save").read_objects(place, catalog)
    model = formats.reader("dcp").read_objects(place, catalog)
    meta = place.sub(META)
    rest = formats.reader("torch_save").read_objects(meta, catalog)
    return LazyMap({name: partial(getitem, part, name) for part in (model, rest) for name in part})


FORMAT = Format(
    name="lightning",
    title="Lightning checkpoint",
    marks="*.ckpt file, or folder with meta.pt",
    read_from="lightning 2.6",
    detect=detect,
    read_catalog=read_catalog,
    read_objects=read_objects,
    missing=missing,
    single_file=True,
    subfolders=("*",),
)
