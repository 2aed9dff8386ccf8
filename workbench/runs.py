"""Which checkpoints lie under a folder, and which of a run's steps to open.

::

    runs/pretrain/
      latest_checkpointed_iteration.txt     a tracker: the step that the trainer would resume from
      step-2000/  .metadata  __0_0.distcp   complete
      step-4000/  .metadata  __0_0.distcp   complete: the newest, opened when nothing else is said
      step-6000/             __0_0.distcp   no .metadata: the save was interrupted
      final/model.safetensors

Only names, sizes and a few bytes are looked at, never a tensor. Links to folders are not followed: inside the root
they would list a checkpoint twice, outside they are none of its business.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from workbench import formats
from workbench.core.place import Place
from workbench.errors import IncompleteError, NotACheckpointError, WorkbenchError

__all__ = ["Found", "discover", "pick", "step_of"]

#: Megatron's; DeepSpeed's, and that of what its ds_to_universal.py made
TRACKERS = ("latest_checkpointed_iteration.txt", "latest", "latest_universal")
TRACKER_LIMIT = 4096  #: bytes of a tracker; real ones hold one number or name
#: Single-file checkpoints.
FILES = (".pt", ".pth", ".ckpt", ".bin", ".tar", ".safetensors", ".pdparams", ".pdopt", ".pdckpt")
BESIDE = (".pt", ".pth", ".ckpt")  #: those that lie beside a folder's weights without being part of them
#: Not a checkpoint of their own: parts of one that lies in the same folder.
PARTS = re.compile(
    r"training_args\.bin|scheduler(_\d+)?\.(bin|pt)|sampler(_\d+)?\.bin|scaler\.pt|rng_state.*\.pth|optimizer.*\.(bin|pt)"
    r"|(scheduler|scaler)\.pdparams"
)
#: Formats whose subfolders belong to them.
CLOSED = {
    "megatron_dist", "megatron_legacy", "dcp", "hf_trainer", "accelerate", "lightning", "bytecheckpoint", "vescale",
    "deepspeed", "deepspeed_universal", "paddlenlp", "paddle_dist",
}  # fmt: skip
STATE = "trainer_state.json"  #: of Hugging Face's trainer and of PaddleNLP's
MAX_NAMED = 3

_STEP = re.compile(
    r"(?:^|[^a-z])(?:global_?step|step|checkpoint|ckpt|iteration|iter)[-_=]?(\d{1,18})(?!\d)", re.IGNORECASE
)
_EPOCH = re.compile(r"(?:^|[^a-z])epoch[-_=]?(\d{1,18})(?!\d)", re.IGNORECASE)
_RANK_METADATA = re.compile(r"__(\d+)\.metadata")
_ZERO_RANK = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,6})_(mp_rank_\d+_?\w+_states\.pt)")
_MP_RANK = re.compile(r"mp_rank_\d{2,4}(?:_\d{3,4}){0,2}")
_PART = re.compile(r"(.*)-(\d{1,9})-of-(\d{1,9})\.(?:safetensors|bin)")


@dataclass(frozen=True, slots=True)
class Found:
    """One checkpoint.

    Attributes:
        path: relative to the root; ``.`` for the root itself.
        format: the reader's name.
        step: as the trainer's file or a folder's name says, else ``None``.
        nbytes: bytes of all its files.
        mtime: seconds since the epoch of its newest file.
        complete: whether the format's commit marker and every file that it lists are there.
        why: what is missing; empty when complete.
    """

    path: str
    format: str
    step: int | None
    nbytes: int
    mtime: float
    complete: bool
    why: str


def discover(root: str | os.PathLike[str], *, depth: int = 3) -> list[Found]:
    """Checkpoints in a folder and in the folders below it, ``depth`` levels deep, sorted by path and step.

    Raises:
        NotACheckpointError: the root does not exist.
        MissingFileError: it cannot be listed.
    """
    place = Place(root)
    if place.file is not None:
        name = formats.detect(place)
        return [] if name is None else [_found(place, ".", name, place.name)]
    found = list(_walk(place, "", depth))
    return sorted(found, key=lambda item: (os.path.dirname(item.path), item.step is None, item.step or 0, item.path))


def pick(place: Place) -> tuple[str, str] | None:
    """The step of a run's folder to open, and a sentence that says why; ``None`` when the folder holds no checkpoint.

    Raises:
        IncompleteError: there are steps, but none is complete.
        NotACheckpointError: there are several checkpoints and no telling which is meant.
    """
    if place.file is not None:
        return None
    found = [item for item in _walk(place, "", 2) if item.path != "."]
    if not found:
        return None
    steps = [item for item in found if item.step is not None]
    if not steps and len(found) == 1 and found[0].complete:
        return found[0].path, f"opened {found[0].path!r}: the only checkpoint in the folder"
    if not steps:
        raise NotACheckpointError(
            f"{place.path!r} holds {len(found)} checkpoints whose names tell no step: {_some(found)}; open one of them"
        )
    complete = [item for item in steps if item.complete]
    if not complete:
        newest = max(steps, key=_step)
        raise IncompleteError(
            f"none of the {len(steps)} steps in {place.path!r} is complete; the newest, {newest.path!r}: {newest.why}"
        )
    tracked, note = _tracked(place, steps)
    if tracked is not None and tracked.complete:
        return tracked.path, f"opened {tracked.path!r}: {note}"
    newest_step = max(map(_step, complete))
    best = [item for item in complete if item.step == newest_step]
    if len(best) > 1:
        raise NotACheckpointError(
            f"step {newest_step} in {place.path!r} is {len(best)} checkpoints: {_some(best)}; open one of them"
        )
    reason = f"opened {best[0].path!r}: the newest complete of {len(steps)} step{'s' if len(steps) > 1 else ''}"
    newer = [item for item in steps if not item.complete and _step(item) > newest_step and item is not tracked]
    for item in sorted(newer, key=_step)[:MAX_NAMED]:
        reason += f"; {item.path!r} is incomplete ({item.why})"
    return best[0].path, reason + (f"; {note}" if note else "")


def step_of(path: str) -> int | None:
    """The step that a folder or file is named after: ``step-N``, ``checkpoint-N``, ``iter_N``, ``epoch_N`` …"""
    for name in reversed(path.split("/")):
        for pattern in (_STEP, _EPOCH):
            if hits := pattern.findall(name):
                return int(hits[-1])
    return None


def _step(item: Found) -> int:
    return -1 if item.step is None else item.step


def _some(found: list[Found]) -> str:
    names = [repr(item.path) for item in found[:MAX_NAMED]]
    return ", ".join(names) + (f", … {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else "")


# ---- walking -------------------------------------------------------------------------------------------------------


def _walk(place: Place, relative: str, depth: int) -> Iterator[Found]:
    try:
        name = formats.detect(place)
        files = place.files
    except WorkbenchError as error:
        yield Found(relative or ".", "unreadable", step_of(relative), 0, 0.0, False, str(error))
        return
    if name is not None:
        yield _found(place, relative or ".", name, relative or place.name)
    if name not in CLOSED:
        for file in files:
            if file.endswith(FILES if name is None else BESIDE) and not PARTS.fullmatch(file):
                yield from _single(place, relative, file)
    if depth <= 0 or name in CLOSED:
        return
    for folder in place.folders:
        inner = f"{relative}/{folder}" if relative else folder
        if folder.startswith(".") or os.path.islink(os.path.join(place.root, folder)) or (name and folder == "sharded"):
            continue
        yield from _walk(place.sub(folder), inner, depth - 1)


def _single(place: Place, relative: str, file: str) -> Iterator[Found]:
    path = f"{relative}/{file}" if relative else file
    try:
        inner = place.sub(file)
        name = formats.detect(inner)
    except WorkbenchError as error:  # a link out of the root, or no permission: listed, not followed
        yield Found(path, "unreadable", step_of(path), 0, 0.0, False, str(error))
        return
    if name is not None:
        yield _found(inner, path, name, path)


def _found(place: Place, path: str, format: str, named: str) -> Found:
    nbytes, mtime = _size(place)
    try:
        why = _COMPLETE.get(format, _nothing)(place)
        step = _stored_step(place) if format in ("hf_trainer", "paddlenlp") and STATE in place.files else None
    except WorkbenchError as error:
        why, step = str(error), None
    return Found(path, format, step_of(named) if step is None else step, nbytes, mtime, not why, why)


def _size(place: Place) -> tuple[int, float]:
    """Bytes and newest modification time of all files, two levels down."""
    stats = list(place.files.values())
    if place.file is None:
        for folder in place.folders:
            if not os.path.islink(os.path.join(place.root, folder)):
                stats += _quietly(place, folder)
    return sum(stat.size for stat in stats), max((stat.mtime_ns for stat in stats), default=0) / 1e9


def _quietly(place: Place, folder: str) -> list[Any]:
    try:
        return list(place.sub(folder).files.values())
    except WorkbenchError:  # a folder without permission has no size that we could tell
        return []


def _stored_step(place: Place) -> int | None:
    state = place.read_json(STATE)
    step = state.get("global_step") if isinstance(state, dict) else None
    return step if type(step) is int else None


def _tracked(place: Place, steps: list[Found]) -> tuple[Found | None, str]:
    """What the tracker names among the steps, and what to say about it."""
    for tracker in TRACKERS:
        if tracker not in place.files or place.files[tracker].size > TRACKER_LIMIT:
            continue
        text = place.read(tracker).decode("utf-8", "replace").strip()
        hits = [item for item in steps if item.path == text or (text.isdigit() and item.step == int(text[:18]))]
        if not hits:
            return None, f"the tracker {tracker!r} names {text[:80]!r}, which is not there"
        if not hits[0].complete:
            return hits[0], f"the tracker {tracker!r} names {hits[0].path!r}, which is incomplete ({hits[0].why})"
        return hits[0], f"the tracker {tracker!r} names it"
    return None, ""


# ---- is it all there? ----------------------------------------------------------------------------------------------
# Each returns what is missing, or an empty string.


def _nothing(place: Place) -> str:
    return ""


def _dcp(place: Place) -> str:
    metadata = place.files.get(".metadata")
    if metadata is not None:
        return "" if metadata.size else ".metadata is empty"
    ranks = {int(match[1]) for name in place.files if (match := _RANK_METADATA.fullmatch(name))}
    absent = sorted(set(range(max(ranks, default=-1) + 1)) - ranks) if max(ranks, default=0) < 1 << 20 else []
    if ranks:
        return f"metadata of {len(absent)} ranks is missing, first __{absent[0]}.metadata" if absent else ""
    return ".metadata is missing" + (", .metadata.tmp is there" if ".metadata.tmp" in place.files else "")


def _weights(place: Place) -> str:
    """Safetensors or torch.save: the files that an index lists, else the parts that their names count."""
    if place.file is not None:
        return "" if place.stat(place.file).size else "the file is empty"
    for name in place.files:
        if name.endswith((".safetensors.index.json", ".bin.index.json")):
            document = place.read_json(name)
            weights = document.get("weight_map") if isinstance(document, dict) else None
            if not isinstance(weights, dict):
                return f"{name!r} has no weight_map"
            lost = sorted({str(file) for file in weights.values() if not place.exists(str(file))})
            return f"{len(lost)} files of {name!r} are missing, first {lost[0]!r}" if lost else ""
    counts: dict[tuple[str, int], set[int]] = {}
    for name in place.files:
        if (match := _PART.fullmatch(name)) and not name.startswith("shard-"):
            counts.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    for (stem, count), there in counts.items():
        if len(there) < count:
            return f"{count - len(there)} of {count} files {stem!r} are missing"
    return ""


def _hf_trainer(place: Place) -> str:
    if "pytorch_model_fsdp_0" in place.folders:
        why = _dcp(place.sub("pytorch_model_fsdp_0"))
        return f"pytorch_model_fsdp_0: {why}" if why else ""
    kinds = ("model", "adapter_model", "pytorch_model", "adapter_model")
    if not any(name.startswith(kinds) and name.endswith((".safetensors", ".bin", ".json")) for name in place.files):
        return "no file of weights"
    return _weights(place)


def _accelerate(place: Place) -> str:
    for folder in place.folders:
        if re.fullmatch(r"(pytorch_model_fsdp|optimizer)_\d+", folder) and (why := _dcp(place.sub(folder))):
            return f"{folder}: {why}"
    if not any(name.startswith("random_states_") for name in place.files):
        return "no random_states_N.pkl, which accelerate writes last"
    return _weights(place)


def _lightning(place: Place) -> str:
    if place.file is not None:
        return _weights(place)
    why = _dcp(place)
    return why or ("" if "meta.pt" in place.files else "meta.pt is missing")


def _parts(place: Place) -> str:
    """ByteCheckpoint and veScale: a DCP folder for each part, or for each pipeline stage of one."""
    for part in ("model", "optimizer"):
        inner = place.sub(part) if part in place.folders else None
        stages = [name for name in inner.folders if re.fullmatch(r"pp_\d+", name)] if inner else []
        for name in [f"{part}/{stage}" for stage in stages] or ([part] if inner and inner.files else []):
            if why := _dcp(place.sub(name)):
                return f"{name}: {why}"
    return ""


def _deepspeed(place: Place) -> str:
    """Ranks between those whose files are there; how many there should be is for the reader to say."""
    ranks: dict[str, set[int]] = {}
    for name in place.files:
        if match := _ZERO_RANK.fullmatch(name):
            ranks.setdefault(match[2], set()).add(int(match[1]))
    for kind, there in ranks.items():
        if len(there) <= max(there):
            return f"{max(there) + 1 - len(there)} of {max(there) + 1} files zero_pp_rank_N_{kind} are missing"
    known = any(name.endswith("model_states.pt") for name in place.files)
    return "" if known else "no model_states file"


def _megatron_dist(place: Place) -> str:
    absent = [name for name in ("metadata.json", ".metadata") if name not in place.files]
    return f"{' and '.join(absent)} missing" if absent else ""


def _megatron_legacy(place: Place) -> str:
    """Ranks that the folders' own numbers say are missing; a whole stage at the end cannot be seen by names."""
    names = [name for name in place.folders if _MP_RANK.fullmatch(name) and place.exists(f"{name}/model_optim_rng.pt")]
    ranks = {tuple(map(int, name.split("_")[2:])) for name in names}
    if len({len(rank) for rank in ranks}) != 1:
        return "mp_rank folders of two runs"
    total = 1
    for axis in zip(*ranks, strict=True):
        total *= max(axis) + 1
    return f"{total - len(ranks)} of {total} mp_rank folders are missing" if len(ranks) < total else ""


def _paddle_dist(place: Place) -> str:
    if any(re.fullmatch(r"\d+\.metadata", name) for name in place.files) or "model_state" in place.folders:
        return ""
    return "N.metadata is missing"


def _paddlenlp(place: Place) -> str:
    """Unified: the files of every index. Legacy and fleet name no list; opening checks the grid of ranks."""
    for name in place.files:
        if name.endswith(".safetensors.index.json"):
            document = place.read_json(name)
            weights = document.get("weight_map") if isinstance(document, dict) else None
            named = set(map(str, weights.values())) if isinstance(weights, dict) else set()
            if lost := sorted(file for file in named if not place.exists(file)):
                return f"{len(lost)} files of {name!r} are missing, first {lost[0]!r}"
    return ""


_COMPLETE: Mapping[str, Callable[[Place], str]] = {
    "paddle_dist": _paddle_dist,
    "paddlenlp": _paddlenlp,
    "megatron_dist": _megatron_dist,
    "megatron_legacy": _megatron_legacy,
    "dcp": _dcp,
    "bytecheckpoint": _parts,
    "vescale": _parts,
    "safetensors": _weights,
    "torch_save": _weights,
    "hf_trainer": _hf_trainer,
    "accelerate": _accelerate,
    "lightning": _lightning,
    "deepspeed": _deepspeed,
    "deepspeed_universal": lambda place: "" if place.exists("zero/optimizer_state.pt") else "no optimizer_state.pt",
}
