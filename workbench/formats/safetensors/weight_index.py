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
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench.core.place import Place, lacking
from workbench.errors import CorruptError, MissingFileError, quoted

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
    for file in index.files:
        try:
            place.stat(file)
        except MissingFileError:
            held = [name for name, where in index.weights.items() if where == file]
            raise MissingFileError(
                f"index {index.name!r} names the file {quoted(file)}, which is missing from {place.path!r}; it holds "
                f"{len(held):,} of {len(index.weights):,} tensors, {quoted(held[0])} first: {remedy}"
            ) from None


def missing_weights(place: Place) -> str:
    """Describe what is missing of safetensors or torch.save weights, by an index or else by numbered names."""
    if place.file is not None:
        return "" if place.stat(place.file).size else "the file is empty"
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


def missing_of_index(place: Place, index: str) -> str:
    """Describe the missing files of an index."""
    lost = [file for file in read_index(place, index).files if not place.exists(file)]
    if not lost:
        return ""
    return f"file {lost[0]!r} of {index!r} is missing" + (f", with {len(lost) - 1:,} more" if len(lost) > 1 else "")
