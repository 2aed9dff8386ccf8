"""Whether a checkpoint is all there, as far as names, sizes and a few bytes tell, format by format.

::

    step-6000/  __0_0.distcp                                         no .metadata: the save was interrupted
    model/      model-00001-of-00002.safetensors                     1 of 2 files 'model' is missing
    iter_10/    mp_rank_00_000  mp_rank_00_001  mp_rank_01_000       1 of 4 mp_rank folders is missing

No tensor is looked at: that is what verifying is for. Each function returns what is missing, or an empty string.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping

from workbench.core.place import Place, lacking
from workbench.errors import UnsafeError
from workbench.formats.deepspeed_names import sort_files
from workbench.formats.deepspeed_zero import count_ranks
from workbench.formats.weight_index import read_index

__all__ = ["missing"]

#: Files that hold a format's data; those of a format that is not named here end in any of these.
DATA = {
    "safetensors": (".safetensors",),
    "torch_save": (".bin", ".pt", ".pth", ".ckpt", ".tar"),
    "dcp": (".metadata", ".distcp"),
    "paddle_save": (".pdparams", ".pdopt", ".pdckpt"),
}
ANY = tuple(ending for endings in DATA.values() for ending in endings)
_RANK_METADATA = re.compile(r"__(\d+)\.metadata")
_ZERO_RANK = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_(mp_rank_\d+_?\w+_states\.pt)")
_MP_RANK = re.compile(r"mp_rank_\d{2,4}(?:_\d{3,4}){0,2}")
_PART = re.compile(r"(.*)-(\d+)-of-(\d+)\.(?:safetensors|bin)")


def missing(place: Place, format: str) -> str:
    """What a checkpoint of this format lacks, in words; empty when its commit marker and every file that it lists are
    there.

    Raises:
        WorkbenchError: a file that had to be looked at cannot be read, which is as good an answer.
    """
    check = _COMPLETE.get(format)
    return (check(place) if check is not None else "") or _leading_out(place, DATA.get(format, ANY))


def _leading_out(place: Place, endings: tuple[str, ...]) -> str:
    """Data that are a link out of the checkpoint: they are there, and opening refuses them."""
    for name in place.files:
        if name.endswith(endings) and os.path.islink(os.path.join(place.root, name)):
            try:
                place.resolve(name)
            except UnsafeError as error:
                return str(error)
    return ""


def _dcp(place: Place) -> str:
    metadata = place.files.get(".metadata")
    if metadata is not None:
        return "" if metadata.size else ".metadata is empty"
    ranks = {int(match[1]) for name in place.files if (match := _RANK_METADATA.fullmatch(name))}
    if ranks:
        absent = next((number for number in range(max(ranks)) if number not in ranks), None)
        count = max(ranks) + 1 - len(ranks)
        lost = lacking(count, max(ranks) + 1, "files __N.metadata")
        return "" if absent is None else f"{lost}, first __{absent}.metadata"
    return ".metadata is missing" + (", .metadata.tmp is there" if ".metadata.tmp" in place.files else "")


def _dcp_in(place: Place, folder: str) -> str:
    inner = place.sub(folder)
    why = _dcp(inner) or _leading_out(inner, DATA["dcp"])
    return f"{folder}: {why}" if why else ""


def _weights(place: Place) -> str:
    """Safetensors or torch.save: the files that an index lists, else the parts that their names count."""
    if place.file is not None:
        return "" if place.stat(place.file).size else "the file is empty"
    for name in place.files:
        if name.endswith((".safetensors.index.json", ".bin.index.json")):
            return _listed(place, name)
    counts: dict[tuple[str, int], set[int]] = {}
    for name in place.files:
        if (match := _PART.fullmatch(name)) and not name.startswith("shard-"):
            counts.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    for (stem, count), there in counts.items():
        if len(there) < count:
            return lacking(count - len(there), count, f"files {stem!r}")
    return ""


def _listed(place: Place, index: str) -> str:
    lost = [file for file in read_index(place, index).files if not place.exists(file)]
    if not lost:
        return ""
    return f"file {lost[0]!r} of {index!r} is missing" + (f", with {len(lost) - 1:,} more" if len(lost) > 1 else "")


def _hf_trainer(place: Place) -> str:
    if "pytorch_model_fsdp_0" in place.folders:
        return _dcp_in(place, "pytorch_model_fsdp_0")
    kinds = ("model", "adapter_model", "pytorch_model", "adapter_model")
    if not any(name.startswith(kinds) and name.endswith((".safetensors", ".bin", ".json")) for name in place.files):
        return "no file of weights"
    return _weights(place)


def _accelerate(place: Place) -> str:
    for folder in place.folders:
        if re.fullmatch(r"(pytorch_model_fsdp|optimizer)_\d+", folder) and (why := _dcp_in(place, folder)):
            return why
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
            if why := _dcp_in(place, name):
                return why
    return ""


def _deepspeed(place: Place) -> str:
    """Ranks that the first optimizer file counts: names alone would not miss the last one."""
    ranks: dict[str, set[int]] = {}
    for name in place.files:
        if match := _ZERO_RANK.fullmatch(name):
            ranks.setdefault(match[2], set()).add(int(match[1]))
    told = count_ranks(place, sort_files(place.files)) or 0
    for kind, there in ranks.items():
        count = max(told, max(there) + 1)
        if len(there) < count:
            return lacking(count - len(there), count, f"files zero_pp_rank_N_{kind}")
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
    return lacking(total - len(ranks), total, "mp_rank folders") if len(ranks) < total else ""


def _paddle_dist(place: Place) -> str:
    if any(re.fullmatch(r"\d+\.metadata", name) for name in place.files) or "model_state" in place.folders:
        return ""
    return "N.metadata is missing"


def _paddlenlp(place: Place) -> str:
    """Unified: the files of every index. Legacy and fleet name no list; opening checks the grid of ranks."""
    for name in place.files:
        if name.endswith(".safetensors.index.json") and (why := _listed(place, name)):
            return why
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
