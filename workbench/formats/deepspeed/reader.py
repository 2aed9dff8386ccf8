"""DeepSpeed checkpoints: ZeRO 0 to 3, pipelines, mixture of experts; one folder per step.

::

    run/  latest                     "global_step4": the tracker, written last
          zero_to_fp32.py            a copy of DeepSpeed's script; never run
          global_step4/              files by rank, see names.py

Keys, all ranks merged:

* ``module.<name>``: the model's weights (bf16), buffers, frozen parameters. Stage 3 stores only the weights that it
  never partitions.
* ``fp32.<name>`` (role ``master``), ``exp_avg.<name>``, ``exp_avg_sq.<name>`` …: every parameter's share of the flat
  partitions, shaped by ``param_shapes``.
* ``optim.group0.step``: one per flat group, one copy per rank; the view ``step.<name>`` shows it for each parameter.
* ``client.<path>``: tensors of the caller's own state. ``optimizer.<path>``: tensors of an optimizer without ZeRO.
* ``….mp_rank_01.<name>``: a piece of a parameter if no file stores how it was divided (merge.py).

Read from deepspeed 0.19.8; the files of ZeRO since 0.3.15, which added ``param_shapes``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from workbench.core.build import CatalogBuilder
from workbench.core.catalog import Catalog
from workbench.core.lazymap import LazyMap
from workbench.core.place import Place, lacking
from workbench.core.words import plural, some_of
from workbench.errors import IncompleteError
from workbench.formats import Format
from workbench.formats.deepspeed.files import FileDecoder, items, tensors
from workbench.formats.deepspeed.merge import Dims, unify, with_views
from workbench.formats.deepspeed.model import OWN, ModelStates, add_model, add_tensors, put
from workbench.formats.deepspeed.names import Folder, is_deepspeed, sort_files
from workbench.formats.deepspeed.zero import Partitions, add_partitions, count_ranks, read_partitions
from workbench.formats.layered import parts
from workbench.names.optimizer import join_param_groups, uncertain
from workbench.names.roles import STATES

#: Entries of model_states that are not listed as state: tensors, or facts that the catalog already has.
_HIDDEN = {"module", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params", "buffer_names"}

_ZERO_RANK = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_(mp_rank_\d+_?\w+_states\.pt)")
INNER, MASTERS = "optimizer_state_dict", "fp32_groups"  #: in stage 0's wrapper around an optimizer of 16-bit weights


def detect(place: Place) -> bool:
    """Return whether the folder holds files with DeepSpeed's names."""
    return place.file is None and is_deepspeed(place.files)


def missing(place: Place) -> str:
    """Describe missing ranks. The first optimizer file stores their number, as names cannot show a lost last rank."""
    ranks: dict[str, set[int]] = {}
    for name in place.files:
        if match := _ZERO_RANK.fullmatch(name):
            ranks.setdefault(match[2], set()).add(int(match[1]))
    stated = count_ranks(place, sort_files(place.files)) or 0
    for kind, present in ranks.items():
        count = max(stated, max(present) + 1)
        if len(present) < count:
            return lacking(count - len(present), count, f"files zero_pp_rank_N_{kind}")
    known = any(name.endswith("model_states.pt") for name in place.files)
    return "" if known else "model_states file is missing"


def read_catalog(place: Place) -> Catalog:
    """Return the catalog of everything stored.

    Raises:
        IncompleteError: the model_states or most of the optimizer files are missing.
        CorruptError: ``param_shapes`` do not add up to the partitions, or files are from different saves.
    """
    reader = FolderReader(place, "deepspeed")
    reader.read_optimizer()
    if not reader.zero and reader.folder.models and all(dp is not None for _, dp in reader.folder.models):
        raise IncompleteError(
            f"{place.path!r} is a ZeRO stage 3 checkpoint, whose weights are in the optimizer files; all are missing, "
            "copy the …optim_states.pt files here"
        )
    reader.read_model()
    if not reader.zero and any(model.shapes for model in reader.models.values()):
        reader.notes.append("there are no optimizer files, only the module's weights")
    return reader.finish()


def read_objects(place: Place, catalog: Catalog) -> Mapping[str, Any]:
    """Return the first model_states by its entries (config, scheduler, client state) and the first ``optim_states``,
    without tensors; decoded on first access.
    """
    listed = catalog.meta.get("objects", {})

    @cache
    def whole(file: str) -> Mapping[str, Any]:
        found = parts.rest(place, file)
        return found if isinstance(found, Mapping) else {}

    makers = {name: partial(_entry, whole, listed["model"], name) for name in listed.get("names", ())}
    if listed.get("optim"):
        makers["optim_states"] = partial(whole, listed["optim"])
    return LazyMap(makers)


def _entry(whole: Any, file: str, name: str) -> Any:
    return whole(file).get(name)


@dataclass
class FolderReader:
    """Collects one folder's files into a catalog; the universal layout adds its own files to the builder."""

    place: Place
    format: str
    folder: Folder = field(init=False)
    builder: CatalogBuilder = field(init=False)
    models: dict[int, ModelStates] = field(default_factory=dict)
    zero: dict[int, Partitions] = field(default_factory=dict)
    names: dict[tuple[str, str], dict[int, str]] = field(default_factory=dict)
    steps: dict[str, tuple[str, str, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder = sort_files(self.place.files)
        self.builder = CatalogBuilder(self.format, self.place)
        self.mps = self.folder.mp_ranks()
        self.several = len(self.mps) > 1 or any(tp for _, tp in self.folder.layers)

    def read_optimizer(self) -> None:
        """Decode ZeRO's optimizer files, which store the stage and the number of ranks."""
        for mp in self.mps:
            found = read_partitions(self.place, self.folder, mp)
            if found is not None:
                self.zero[mp] = found

    def read_model(self) -> None:
        """Declare every tensor of the folder's files."""
        for mp in self.mps:
            self._model(mp)
        self._layers()
        for mp, found in self.zero.items():
            self._partitions(mp, found)
        self._unpartitioned()

    def key(self, mp: int, state: str, name: str) -> str:
        """Return a stored key, and remember its name for the merge of the ranks."""
        key = f"{state}.mp_rank_{mp:02d}.{name}" if self.several else f"{state}.{name}"
        self.names.setdefault((state, name), {})[mp] = key
        return key

    def finish(self) -> Catalog:
        """Return the catalog with unified names, views and facts."""
        facts = self._facts()
        catalog = self.builder.build(facts, named=True)
        if self.several:
            catalog, notes = unify(catalog, self.names, self._dims(), self._info(), self._mp_of_file(catalog))
            facts["notes"] += notes
        shared = {alias: owner for model in self.models.values() for alias, owner in model.shared.items()}
        views = dict(self.steps) | _tied(catalog)
        for state, name in self.names:
            for alias in (alias for alias, owner in shared.items() if owner == name):
                at = catalog.index.get(f"{state}.{name}")
                if at is not None:
                    views[f"{state}.{alias}"] = f"{state}.{name}", alias, (catalog.roles or [])[at]
        return with_views(replace(catalog, meta={**catalog.meta, **facts}), views)

    # ---- files -----------------------------------------------------------------------------------------------------

    def _model(self, mp: int) -> None:
        zero = self.zero.get(mp)
        stage3 = zero.first.stage3 if zero else not any(dp is None for m, dp in self.folder.models if m == mp)
        key = partial(self.key, mp)
        dp = len(zero.shards) if zero else 0
        model = add_model(self.builder, self.place, self.folder, mp, stage3, dp, key, not self.several)
        self.models[mp] = model
        self.notes += model.notes

    def _layers(self) -> None:
        """Add pipeline layers under their global numbers, and experts under the names in their files."""
        decoder = FileDecoder(self.place)
        for (layer, tp), file in sorted(self.folder.layers.items(), key=lambda item: (item[0][0], item[0][1] or 0)):
            states = decoder.read(file)
            add_tensors(self.builder, states, f"{layer}.", partial(self.key, tp or 0, "module"))
        for (_, _, mp), file in sorted(self.folder.experts.items()):
            add_tensors(self.builder, decoder.read(file), "", partial(self.key, mp, "module"))

    def _partitions(self, mp: int, found: Partitions) -> None:
        for shard in found.shards:
            if shard is not None:
                self.builder.file(shard.file, metadata=True, end=shard.end)
        shapes = self.models[mp].shapes
        if shapes is None:
            raise IncompleteError(
                f"{self.models[mp].file!r} has no param_shapes, so the parameters cannot be located in the "
                "optimizer files: it is from another save, or from DeepSpeed before 0.3.15"
            )
        config = self.models[mp].facts.get("ds_config")
        data_first = isinstance(config, Mapping) and config.get("use_data_before_expert_parallelism") is True
        self.notes += add_partitions(
            self.builder, found, shapes, partial(self.key, mp), rank=not self.several, data_first=data_first
        )
        self._scalars(mp, found, [list(group) for group in shapes])
        if found.extra:
            self.notes.append(
                f"{plural(len(found.extra), 'file', 'are')} of ranks that this save did not have "
                f"({plural(len(found.shards), 'rank')}), left over from another save: {found.extra[0]!r}"
            )
        if len(found.steps) > 1:
            self.notes.append(f"ranks of mp_rank {mp:02d} have different steps: {some_of(sorted(found.steps), 8)}")

    def _scalars(self, mp: int, found: Partitions, groups: list[list[str]]) -> None:
        """Add ``step`` and other tensors that are not partitions: one per group and rank."""
        label = f"mp_rank_{mp:02d}." if self.several else ""
        seen: set[str] = set()
        for rank, shard in enumerate(found.shards):
            for (group, state), at in shard.scalars.items() if shard is not None else ():
                whole = len(at.shape) == 0 or at.shape == (1,)
                key = f"optim.{label}group{group}.{state}" + ("" if whole else f".rank{rank}")
                role = STATES.get(state, "other")
                put(self.builder, key, at, fqn=None, role=role, rank=-1 if self.several else rank)
                if state == "step" and whole and len(groups) == found.first.groups and key not in seen:
                    seen.add(key)
                    for name in groups[group]:
                        self.steps.setdefault(f"step.{name}", (key, name, "step"))

    def _unpartitioned(self) -> None:
        """Add optimizers without ZeRO: in model_states, or one file per expert-parallel rank."""
        for mp, model in self.models.items():
            if not model.optimizer:
                continue
            numbers = _numbers(model)
            joined = self._join(model, numbers)
            for path, at in model.optimizer:
                fqn = joined.get(numbers.get(path, -1))
                role = "master" if path[0] == MASTERS else STATES.get(str(path[-1]), "other")
                put(self.builder, self.key(mp, "optimizer", ".".join(map(str, path))), at, fqn=fqn, role=role, rank=-1)
            if unnamed := {number for number in numbers.values() if number not in joined}:
                self.notes.append(uncertain("optimizer", len(unnamed)))
        for (ep, mp), file in sorted(self.folder.expert_optims.items()):
            self.notes.append(f"{file!r}: the parameters of an expert optimizer without ZeRO keep its own numbers")
            states = FileDecoder(self.place).read(file)
            self.builder.file(file, metadata=True, end=states.end)
            for path, ref in tensors(states.tree):
                key = ".".join(["optim", f"expp_rank_{ep}", f"mp_rank_{mp:02d}", *map(str, path)])
                role = STATES.get(str(path[-1]), "other")
                put(self.builder, key, states.locate(ref, key), fqn=None, role=role)

    def _join(self, model: ModelStates, numbers: Mapping[tuple[Any, ...], int]) -> dict[int, str]:
        """Return parameters by the optimizer's numbers where that is certain; frozen ones have no number."""
        groups = _param_groups(model)[1]
        shapes = {
            numbers[path]: at.shape
            for path, at in model.optimizer
            if path in numbers and (path[0] == MASTERS or STATES.get(path[-1]) != "step")
        }
        params = {name: shape for name, shape in model.params.items() if name not in model.shared}
        if len(groups) == 1 and len(shapes) < len(params):
            ordered = [shapes[number] for number in items(groups[0].get("params")) if number in shapes]
            params = {name: params[name] for name in _only_way(ordered, params)} or params
        return join_param_groups(groups, shapes, list(params), params, ordered=True) or {}

    # ---- facts -----------------------------------------------------------------------------------------------------

    def _facts(self) -> dict[str, Any]:
        first = self.models[min(self.models)] if self.models else None
        entries = first.facts if first is not None else {}
        step = entries.get("global_steps")
        facts: dict[str, Any] = {
            "step": step if type(step) is int else None,
            "world_size": self._world(entries),
            "notes": self.notes,
            "mesh": self._mesh(entries),
            "version": entries.get("ds_version") if isinstance(entries.get("ds_version"), str) else None,
        }
        trained = {name for model in self.models.values() for group in model.shapes or () for name in group}
        if frozen := {name for model in self.models.values() for name in model.params if name not in trained}:
            facts["frozen"] = sorted(frozen) if trained else []
        lost = [(mp, zero.lost) for mp, zero in self.zero.items() if zero.lost]
        if lost:
            mp, ranks = lost[0]
            facts["incomplete"] = (
                f"{lacking(len(ranks), len(self.zero[mp].shards), f'optimizer files of mp_rank {mp:02d}')}, of "
                f"data-parallel ranks {some_of(ranks, 8)}; copy them here, or open with partial=True to read the rest"
            )
        degree = self._degree(entries)
        absent = [mp for mp in range(degree or 0) if mp not in self.models]
        if absent:
            facts["incomplete"] = (
                f"files of model-parallel ranks {some_of(absent, 8)} of {degree} are missing; copy them here, or "
                "open with partial=True to read the rest"
            )
        if first is not None:
            names = [name for name in entries if name not in _HIDDEN and (name not in OWN or entries[name] is not None)]
            optim = self.zero[min(self.zero)].first.file if self.zero else None
            facts["objects"] = {"model": first.file, "names": names, "optim": optim}
        return facts

    def _degree(self, entries: Mapping[Any, Any]) -> int | None:
        """Return the expected number of model-parallel ranks, if it is stored."""
        dims = entries.get("checkpoint_parallel_dimensions")
        if isinstance(dims, Mapping):
            pp, tp = dims.get("pp_degree"), dims.get("tp_degree")
            if type(pp) is int and type(tp) is int and 0 < pp * tp <= 1 << 16:
                return pp * tp
        size = entries.get("mp_world_size")
        return size if type(size) is int and 0 < size <= 1 << 16 else None

    def _world(self, entries: Mapping[Any, Any]) -> int | None:
        dp = entries.get("dp_world_size")
        return dp * len(self.models) if type(dp) is int and self.models else None

    def _dims(self) -> Dims:
        entries = self.models[min(self.models)].facts if self.models else {}
        dims = entries.get("checkpoint_parallel_dimensions")
        if isinstance(dims, Mapping) and type(dims.get("tp_degree")) is int and dims["tp_degree"] > 0:
            return Dims(dims.get("pp_degree"), dims["tp_degree"], "checkpoint_parallel_dimensions in model_states")
        if self.folder.layers:
            tp = len({tp for _, tp in self.folder.layers})
            return Dims(len(self.mps) // tp, tp, "names of the layer files")
        if entries.get("mp_world_size") == len(self.mps):
            return Dims(1, len(self.mps), "mp_world_size in model_states")
        return Dims(None, None, "")

    def _info(self) -> Any:
        for model in self.models.values():
            if model.facts.get("universal_checkpoint_info") is not None:
                return model.facts["universal_checkpoint_info"]
        return next((zero.first.info for zero in self.zero.values() if zero.first.info is not None), None)

    def _mp_of_file(self, catalog: Catalog) -> list[int]:
        where = {file: mp for (mp, _), file in self.folder.models.items()}
        where |= {file: mp for mp, zero in self.zero.items() for file in zero.files}
        where |= {file: tp or 0 for (_, tp), file in self.folder.layers.items()}
        where |= {file: mp for (_, _, mp), file in self.folder.experts.items()}
        return [where.get(file, -1) for file in catalog.files]

    def _mesh(self, entries: Mapping[Any, Any]) -> dict[str, Any]:
        dims = self._dims()
        counts = {len(zero.shards) for zero in self.zero.values()}
        axes: dict[str, int] = {"dp": counts.pop()} if len(counts) == 1 else {}
        if not axes and type(entries.get("dp_world_size")) is int:
            axes["dp"] = entries["dp_world_size"]
        known = dims.tp is not None and dims.pp is not None
        axes |= {"pp": dims.pp, "tp": dims.tp} if known else {}  # type: ignore[dict-item]
        ranks: dict[str, dict[str, int]] = {}
        for mp, zero in self.zero.items():
            for dp, shard in enumerate(zero.shards):
                if shard is not None:
                    place = {"pp": mp // dims.tp, "tp": mp % dims.tp} if dims.tp else {"mp": mp}
                    ranks[shard.file] = {"dp": dp, **place}
        unknown = [] if known else ["pp", "tp"]
        source = "; ".join(filter(None, ["partition_count in optim_states" if self.zero else "", dims.source]))
        return {"axes": axes, "ranks": ranks, "unknown": [*unknown, "sp"], "source": source}


def _param_groups(model: ModelStates) -> tuple[tuple[str, ...], list[Mapping[str, Any]]]:
    """Return the path of the inner optimizer's state dict in the stored one, and its param groups."""
    stored = model.facts.get("optimizer")
    for path in ((INNER,), ()):  # DeepSpeed's own wrapper stores masters next to it
        found = stored.get(INNER) if path and isinstance(stored, Mapping) else stored
        groups = items(found.get("param_groups")) if isinstance(found, Mapping) else ()
        if groups and all(isinstance(group, Mapping) for group in groups):
            return path, list(groups)
    return (), []


def _numbers(model: ModelStates) -> dict[tuple[Any, ...], int]:
    """Return the optimizer's parameter number for each of its tensors, by path."""
    prefix, groups = _param_groups(model)
    found: dict[tuple[Any, ...], int] = {}
    for path, _ in model.optimizer:
        number: object = None
        if path[0] == MASTERS and len(path) == 3 and type(path[1]) is type(path[2]) is int and path[1] < len(groups):
            params = items(groups[path[1]].get("params"))
            number = params[path[2]] if path[2] < len(params) else None
        elif path[:-2] == (*prefix, "state"):
            number = path[-2]
        if type(number) is int:
            found[path] = number
    return found


def _only_way(model_shapes: Sequence[tuple[int, ...]], params: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return the parameters with these shapes in the model's order if there is only one choice; otherwise none."""

    def first(shapes: Sequence[tuple[int, ...]], names: Sequence[str]) -> list[str]:
        rest = iter(names)
        found = [next((name for name in rest if params[name] == shape), "") for shape in shapes]
        return [name for name in found if name]

    names = list(params)
    forth, back = first(model_shapes, names), first(model_shapes[::-1], names[::-1])[::-1]
    return forth if forth == back and len(forth) == len(model_shapes) else []


def _tied(catalog: Catalog) -> dict[str, tuple[str, str, str]]:
    """Return views of a pipeline's tied layer under both of its names: key → ``(owner's key, fqn, role)``.

    The optimizer names it ``tied_modules.<group>.<rest>``, its layer file ``<layer>.<rest>``. The two are joined if one
    weight without its own state has this rest and shape, and no other tied group matches.
    """
    of: dict[str, dict[str, int]] = {}
    for tensor, (fqn, role) in enumerate(zip(catalog.fqns or (), catalog.roles or (), strict=True)):
        if fqn is not None:
            of.setdefault(fqn, {})[role] = tensor
    alike: dict[tuple[str, tuple[int, ...]], tuple[list[str], list[str]]] = {}
    for fqn, roles in of.items():
        parts, tied = fqn.split(".", 2), fqn.startswith("tied_modules.")
        if tied and len(parts) == 3 and "param" not in roles and "master" in roles:
            alike.setdefault((parts[2], catalog.shape_of(roles["master"])), ([], []))[0].append(fqn)
        elif parts[0].isdigit() and set(roles) == {"param"}:
            rest = fqn.split(".", 1)[1] if len(parts) > 1 else ""
            alike.setdefault((rest, catalog.shape_of(roles["param"])), ([], []))[1].append(fqn)
    views = {}
    for names, weights in alike.values():
        if len(names) == 1 and len(weights) == 1:
            (name,), (weight,) = names, weights
            views[f"module.{name}"] = catalog.keys[of[weight]["param"]], name, "param"
            for role, tensor in of[name].items():
                key = catalog.keys[tensor]
                views[key.removesuffix(name) + weight] = key, weight, role
    return views


FORMAT = Format(
    name="deepspeed",
    title="DeepSpeed ZeRO 0 – 3, pipeline, MoE",
    marks="mp_rank_00_model_states.pt, …optim_states.pt",
    read_from="deepspeed 0.3.15 – 0.19",
    detect=detect,
    read_catalog=read_catalog,
    read_objects=read_objects,
    missing=missing,
    subfolders=("*",),
    never_cuts=("dp",),
    flat_roles=("master", "exp_avg", "exp_avg_sq", "momentum"),
)
