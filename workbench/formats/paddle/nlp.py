"""PaddleNLP's ``checkpoint-N`` in its three layouts, and fleet's folders of ranks.

::

    checkpoint-30/   legacy     model_state.tp00_pp01.pdparams, optimizer.tp00_pp01_shard01.pdopt   nlp_ranks.py
                     unified    model-00001-of-00004.safetensors, optimizer-…, master_weights-…     nlp_unified.py
                     both       trainer_state.json (global_step), config.json, scheduler.pdparams, scaler.pdparams,
                                rng_state_WORLD.pth (a plain pickle), training_args.bin, saved_signal_R
    mp_00_sharding_01_pp_00/    fleet: one folder per rank                                          nlp_ranks.py

The order of ranks is configurable and not stored (the order in which fleet nests its axes). Coordinates come from file
names, and ``ckpt.mesh`` has no global ranks. Source: PaddleNLP 3.0.0b4, paddlepaddle 3.3.1 ``distributed/fleet``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from workbench.core.build import CatalogBuilder
from workbench.core.catalog import Catalog
from workbench.core.lazymap import LazyMap
from workbench.core.place import Place
from workbench.errors import CorruptError, IncompleteError, WorkbenchError
from workbench.formats import Format
from workbench.formats.layered import parts
from workbench.formats.paddle import names as paddle_names
from workbench.formats.paddle import nlp_ranks as paddlenlp_ranks
from workbench.formats.paddle import nlp_unified as paddlenlp_unified
from workbench.formats.paddle import tree as paddle_tree
from workbench.formats.paddle.nlp_ranks import Facts, RankFile
from workbench.formats.paddle.pickle import load
from workbench.formats.safetensors.weight_index import missing_of_index

STATE, CONFIG, META = "trainer_state.json", "config.json", "model_meta.json"
FLEET_FILES = {"model.pdparams": True, "model_state.pdopt": False}  #: file → whether it holds weights
SMALL = 1 << 20  #: bytes of a config.json that detection reads
_LEGACY = re.compile(r"(model_state|optimizer)(?:\.((?:(?:tp|pp|shard|moe|dp)\d{1,6}_?)+))?\.(pdparams|pdopt)")
_COORD = re.compile(r"(tp|pp|shard|moe|dp)(\d+)")
_FLEET = re.compile(r"mp_(\d{1,6})_sharding_(\d{1,6})_pp_(\d{1,6})")
_RNG = re.compile(r"rng_state_(\d{1,9})\.pth")
_SIGNAL = re.compile(r"saved_signal_(\d{1,9})")
_PICKLES = re.compile(r"scheduler\.pdparams|scaler\.pdparams|rng_state(?:_\d+)?\.pth|training_args\.bin")
_JSON = re.compile(r"trainer_state\.json|model_meta\.json|.*config.*\.json")
_DEGREES = {"tp": "mp_degree", "pp": "pp_degree", "sharding": "sharding_degree"}


def detect(place: Place) -> bool:
    """Return whether the folder has rank files, fleet's rank folders, or safetensors and PaddleNLP's files."""
    if place.file is not None:
        return False
    return bool(_legacy(place)) or bool(_fleet(place)) or _is_unified(place)


def missing(place: Place) -> str:
    """Describe missing files of every index (unified). Legacy and fleet list no files; opening checks the rank grid."""
    for name in place.files:
        if name.endswith(".safetensors.index.json") and (why := missing_of_index(place, name)):
            return why
    return ""


def read_catalog(place: Place) -> Catalog:
    """Return the catalog of weights, optimizer state and master weights.

    Raises:
        IncompleteError: ranks have no file; the message has their coordinates.
        CorruptError: files are from several jobs or contradict each other.
        OpenError: raised by the files' own readers.
    """
    builder = CatalogBuilder("paddlenlp", place)
    notes: list[str] = []
    state = _json(builder, place, STATE)
    step = state.get("global_step")
    meta: dict[str, Any] = {"step": step if type(step) is int else None, "world_size": _world(place), "notes": notes}
    if files := _legacy(place):
        facts = _legacy_facts(builder, place, files, notes)
    elif files := _fleet(place):
        facts = Facts(
            {axis: 1 + max(file.at(axis) for file in files) for axis in ("tp", "sharding", "pp")}, {}, notes=notes
        )
        facts.config = _json(builder, place, CONFIG)
        for what, model in (("model", True), ("optimizer", False)):
            paddlenlp_ranks.check_grid([file for file in files if file.model == model], facts.degrees, what)
        meta["step"] = _fleet_step(builder, place, notes) if meta["step"] is None else meta["step"]
    else:
        paddlenlp_unified.read(builder, place, notes)
        tp = _json(builder, place, CONFIG).get("tensor_parallel_degree")
        meta["mesh"] = _mesh({"tp": tp} if type(tp) is int and tp > 0 else {}, [], meta["world_size"])
    if files:
        paddlenlp_ranks.read(builder, place, files, facts)
        meta["mesh"] = _mesh(facts.degrees, files, meta["world_size"])
    _signals(place, meta["world_size"], notes)
    return builder.build(meta, named=True)


def read_objects(place: Place, catalog: Catalog) -> Mapping[str, Any]:
    """Return configs and states by file stem, facts of indices, and the step inferred from betas (``beta_pow``)."""
    makers: dict[str, Any] = {}
    for name in place.files:
        stem = name.rpartition(".")[0]
        if name.endswith(paddlenlp_unified.INDEX):
            makers[name.removesuffix(".json")] = partial(_without_map, place, name)
        elif _JSON.fullmatch(name):
            makers[stem] = partial(place.read_json, name)
        elif _PICKLES.fullmatch(name):
            makers[stem] = partial(_pickle, place, name)
    for folder in place.folders:
        if _FLEET.fullmatch(folder) and place.exists(f"{folder}/meta_state.pdopt"):
            makers[f"{folder}/meta_state"] = partial(_pickle, place, f"{folder}/meta_state.pdopt")
    if any(role in paddlenlp_ranks.POWERS for role in catalog.roles or []):
        makers["beta_pow"] = partial(paddle_names.step_facts, place, catalog)
    return LazyMap(makers)


# ---- files ---------------------------------------------------------------------------------------------------------


def _legacy(place: Place) -> list[RankFile]:
    found = []
    for name in place.files:
        if match := _LEGACY.fullmatch(name):
            coords = {"sharding" if a == "shard" else a: int(n) for a, n in _COORD.findall(match[2] or "")}
            found.append(RankFile(name, coords, match[1] == "model_state"))
    return found if any(file.model for file in found) or place.exists(STATE) else []


def _fleet(place: Place) -> list[RankFile]:
    found = []
    for folder in place.folders:
        if (match := _FLEET.fullmatch(folder)) and place.exists(folder):  # a link out of the folder counts as missing
            coords = {"tp": int(match[1]), "sharding": int(match[2]), "pp": int(match[3])}
            present = [name for name in FLEET_FILES if name in place.sub(folder).files]
            found += [RankFile(f"{folder}/{name}", coords, FLEET_FILES[name]) for name in present]
    return found


def _is_unified(place: Place) -> bool:
    groups = paddlenlp_unified.groups(place)
    if "master_weights" in groups:
        return True
    if not groups:
        return False
    if any(_PICKLES.fullmatch(name) and name.endswith(".pdparams") for name in place.files):
        return True
    config = place.files.get(CONFIG)
    return config is not None and config.size <= SMALL and b'"paddlenlp_version"' in place.read(CONFIG)


# ---- other files ---------------------------------------------------------------------------------------------------


def _json(builder: CatalogBuilder, place: Place, name: str) -> dict[str, Any]:
    if name not in place.files:
        return {}
    builder.file(name, metadata=True)
    found = place.read_json(name)
    if not isinstance(found, dict):
        raise CorruptError(f"{name!r} is a JSON {type(found).__name__}, not an object")
    return found


def _legacy_facts(builder: CatalogBuilder, place: Place, files: list[RankFile], notes: list[str]) -> Facts:
    meta = _json(builder, place, META)
    parallel = meta.get("parallel_config")
    parallel = parallel if isinstance(parallel, dict) else {}
    degrees = {
        axis: parallel[name]
        for axis, name in _DEGREES.items()
        if type(parallel.get(name)) is int and parallel[name] > 0
    }
    models, optimizers = [file for file in files if file.model], [file for file in files if not file.model]
    if not models:
        raise IncompleteError(f"{place.path!r} has optimizer files but no model_state file; the save was interrupted")
    paddlenlp_ranks.check_grid(models, degrees, "model_state")
    if optimizers:
        paddlenlp_ranks.check_grid(optimizers, degrees, "optimizer")
    else:
        notes.append("no optimizer state: a resume from here resets the optimizer")
    if degrees.get("tp", 1) > 1 and all("tp" not in file.coords for file in models):
        raise IncompleteError(f"{META!r} has mp_degree {degrees['tp']}, but no model_state file names a tp rank")
    for axis in ("tp", "pp", "sharding"):
        degrees.setdefault(axis, 1 + max(file.at(axis) for file in files))
    facts = Facts(degrees, _json(builder, place, CONFIG), notes=notes)
    metas = meta.get("sharding_metas")
    for spot, one in metas.items() if isinstance(metas, dict) else ():
        coords = {axis: int(number) for axis, number in _COORD.findall(str(spot))}
        where = coords.get("tp", 0), coords.get("pp", 0)
        if isinstance(one, dict):
            names, params = one.get("structure_name_mapping"), one.get("param_meta")
            if isinstance(names, dict):
                facts.tables[where] = paddle_names.static_table((v, k) for k, v in names.items() if isinstance(v, str))
            if isinstance(params, dict):
                facts.distributed[where] = {
                    name: row[2]
                    for name, row in params.items()
                    if isinstance(row, list) and len(row) > 2 and isinstance(row[2], bool)
                }
    return facts


def _fleet_step(builder: CatalogBuilder, place: Place, notes: list[str]) -> int | None:
    steps: dict[int, list[str]] = {}
    for folder in place.folders:
        name = f"{folder}/meta_state.pdopt"
        if _FLEET.fullmatch(folder) and place.exists(name):
            builder.file(name, metadata=True)
            kept = _pickle(place, name)
            if isinstance(kept, dict) and type(kept.get("step")) is int:
                steps.setdefault(kept["step"], []).append(folder)
    if len(steps) > 1:
        by_step = "; ".join(f"{step}: {', '.join(map(repr, folders[:2]))}" for step, folders in sorted(steps.items()))
        notes.append(f"ranks have different steps ({by_step}): the folder holds parts of two saves")
    return next(iter(steps)) if len(steps) == 1 else None


def _world(place: Place) -> int | None:
    found = [int(match[1]) for name in place.files if (match := _RNG.fullmatch(name))]
    return found[0] if len(found) == 1 else None


def _signals(place: Place, world: int | None, notes: list[str]) -> None:
    signalled = {int(match[1]) for name in place.files if (match := _SIGNAL.fullmatch(name))}
    if signalled and world is not None and world <= 1 << 20 and (lost := sorted(set(range(world)) - signalled)):
        notes.append(
            f"{len(lost)} of {world} ranks left no saved_signal, first {lost[0]}: their save may not have finished"
        )


def _mesh(degrees: Mapping[str, int], files: list[RankFile], world: int | None) -> dict[str, Any]:
    axes, product = dict(degrees), 1
    for size in degrees.values():
        product *= size
    unknown = ["dp", "sep", "cp"]
    if len(degrees) == 3 and world == product:  # no ranks are left for other axes
        axes |= dict.fromkeys(unknown, 1)
        unknown = []
    unknown += [axis for axis in ("tp", "pp", "sharding") if axis not in degrees]
    return {
        "axes": axes,
        "ranks": {file.name: dict(file.coords) for file in files},
        "unknown": [*unknown, "order of ranks"],
        "source": "names of files, model_meta.json, config.json, rng_state_WORLD.pth",
    }


# ---- objects -------------------------------------------------------------------------------------------------------


def _pickle(place: Place, name: str) -> Any:
    try:
        loaded = load(place, name)
    except CorruptError:
        if place.read(name, length=min(2, place.stat(name).size)) != b"PK":
            raise
        raise WorkbenchError(f"{name!r} is a torch.save archive; open it separately") from None
    return paddle_tree.rest(loaded, repr(name), arrays=True)


def _without_map(place: Place, name: str) -> Any:
    document = place.read_json(name)
    return (
        {key: value for key, value in document.items() if key != "weight_map"} if isinstance(document, dict) else None
    )


FORMAT = Format(
    name="paddlenlp",
    title="PaddleNLP checkpoint-N, fleet",
    marks="model_state*.pdparams, mp_TT_sharding_SS_pp_PP/",
    read_from="paddlenlp 3.0.0b4",
    detect=detect,
    read_catalog=read_catalog,
    read_objects=read_objects,
    missing=missing,
    stored_step=parts.trainer_step,
    subfolders=("*",),
    framework="paddle",
    never_cuts=("dp", "sharding"),
)
