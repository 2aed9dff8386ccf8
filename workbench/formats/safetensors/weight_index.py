"""The index of a model's files: the file of each tensor.

::

    model.safetensors.index.json      {"metadata": {"total_size": 16060522496},
                                       "weight_map": {"lm_head.weight": "model-00004-of-00004.safetensors", …}}
    pytorch_model.bin.index.json      the same for torch.save's files
    optimizer.safetensors.index.json  the same, with more keys beside the map (PaddleNLP)

Sources: transformers 5.23, PaddleNLP 3.0.0b4 ``trainer/unified_checkpoint``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.core.place import Place, lacking, stat_or_absent
from workbench.core.words import plural, some_of
from workbench.errors import CorruptError, MissingFileError, quoted

SINGLE, SINGLE_INDEX = "model.safetensors", "model.safetensors.index.json"
_PART = re.compile(r"(.*)-(\d+)-of-(\d+)\.(?:safetensors|bin)")


@dataclass(frozen=True)
class WeightIndex:
    """One index.

    Attributes:
        name: the name of its file.
        weights: tensor → file.
        facts: its other contents.
    """

    name: str
    weights: Mapping[str, str]
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def files(self) -> list[str]:
        """The distinct files in the index, sorted."""
        return sorted(set(self.weights.values()))

    def other_size(self, nbytes: int) -> str:
        """Return the bytes of tensors that the index states, as text, if they are not ``nbytes``; empty otherwise."""
        facts = self.facts.get("metadata")
        stated = facts.get("total_size") if isinstance(facts, dict) else None
        if not isinstance(stated, (int, float)) or stated in (nbytes, nbytes / (1 << 20)):  # Colossal-AI states MiB
            return ""
        return f"{stated:,.0f}" if isinstance(stated, float) else f"{stated:,}"  # NaN and infinity are floats too


def read_index(place: Place, name: str) -> WeightIndex:
    """Read an index; :func:`check_files` checks that its files exist.

    Raises:
        CorruptError: the file is not JSON, or has no map of names to names.
    """
    document = place.read_json(name)
    weights = document.pop("weight_map", None) if isinstance(document, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(file, str) for file in weights.values()):
        raise CorruptError(f"index {name!r} has no weight_map of tensor names to file names")
    return WeightIndex(name, weights, document)


def check_files(place: Place, index: WeightIndex, *, remedy: str = "download or restore it") -> None:
    """Check that every file in the index exists.

    Raises:
        MissingFileError: a file is missing; the message has the number of its tensors.
        UnsafeError: a file is outside the folder.
    """
    if absent := absent_files(place, index):
        raise MissingFileError(f"{_lost_with(place, index, absent[0])}: {remedy}")


def absent_files(place: Place, index: WeightIndex) -> list[str]:
    """Return the files of the index that do not exist.

    Raises:
        UnsafeError: a file is outside the folder.
    """
    return [file for file in index.files if stat_or_absent(place, file).size < 0]


def _lost_with(place: Place, index: WeightIndex, file: str) -> str:
    held = [name for name, where in index.weights.items() if where == file]
    return (
        f"index {index.name!r} names the file {quoted(file)}, which is missing from {place.path!r}; it holds "
        f"{len(held):,} of {len(index.weights):,} tensors, {quoted(held[0])} first"
    )


def find_tensors(
    place: Place, index: WeightIndex, absent: Sequence[str], holds: Mapping[str, Collection[str]], notes: list[str]
) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the file of each tensor that is there, and what is lost, as facts for a catalog (``LOST_FACTS``).

    Args:
        absent: files of the index that do not exist.
        holds: the names of the tensors in each of the others.
        notes: what a checkpoint that is opened in part lacks is added.
    """
    found = {name: file for name, file in index.weights.items() if name in holds.get(file, ())}
    lost = [name for name, file in index.weights.items() if file not in holds]
    misplaced = {name: file for name, file in index.weights.items() if file in holds and name not in found}
    facts: dict[str, Any] = {}
    if absent:
        text = _lost_with(place, index, absent[0])
        facts["absent"] = f"{text}: download or restore it, or open the rest with partial=True"
        notes.append(f"opened in part: {plural(len(lost), 'tensor')} of absent files are left out: {some_of(absent)}")
    if not misplaced:
        return found, facts
    others: dict[str, list[str]] = defaultdict(list)
    for other, names in holds.items():
        for name in misplaced.keys() & set(names):
            others[name].append(other)
    name, file = next(iter(misplaced.items()))
    where, remedy = "no other file holds it either", "restore the files that were saved together"
    if others[name]:
        where, remedy = f"it is in {' and '.join(map(repr, others[name]))}", "correct the index"
    facts["contradiction"] = (
        f"index {index.name!r} maps tensor {quoted(name)} to {file!r}, which lacks it; {where}: {remedy}, or open the "
        "rest with partial=True"
    )
    moved = {name: others[name][0] for name in misplaced if len(others[name]) == 1}
    if moved:
        text = some_of(moved.items(), show=lambda item: f"{item[0]!r} in {item[1]!r}")
        notes.append(f"read from other files than {index.name!r} states: {text}")
    if gone := [name for name in misplaced if name not in moved]:
        notes.append(f"opened in part: not in the files that {index.name!r} states: {some_of(gone)}")
    return found | moved, facts


def missing_weights(place: Place) -> str:
    """Describe what is missing of safetensors or torch.save weights, by an index or else by numbered names."""
    if place.file is not None:
        return "" if place.stat(place.file).size else "the file is empty"
    if before_index(place):
        return ""
    for name in place.files:
        if name.endswith((".safetensors.index.json", ".bin.index.json")):
            return missing_of_index(place, name)
    counts: dict[tuple[str, int], set[int]] = {}
    for name in place.files:
        if (match := _PART.fullmatch(name)) and not name.startswith("shard-"):
            counts.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    for (stem, count), present in counts.items():
        if len(present) < count:
            return lacking(count - len(present), count, f"files {stem!r}")
    return ""


def before_index(place: Place) -> bool:
    """Return whether a folder has ``model.safetensors``, which transformers loads in preference to the shards of an
    index. A file that the index itself lists is one of its shards.
    """
    if not {SINGLE, SINGLE_INDEX} <= place.files.keys():
        return False
    return SINGLE not in read_index(place, SINGLE_INDEX).files


def other_weights(place: Place) -> list[str]:
    """Return the weights of torch.save in a folder. transformers loads safetensors if there are any."""
    return [name for name in place.files if name in ("pytorch_model.bin", "pytorch_model.bin.index.json")]


def missing_of_index(place: Place, index: str) -> str:
    """Describe the missing files of an index."""
    lost = [file for file in read_index(place, index).files if not place.exists(file)]
    if not lost:
        return ""
    return f"file {lost[0]!r} of {index!r} is missing" + (f", with {len(lost) - 1:,} more" if len(lost) > 1 else "")
