"""The index beside a model's files: which tensor is in which of them.

::

    model.safetensors.index.json      {"metadata": {"total_size": 16060522496},
                                       "weight_map": {"lm_head.weight": "model-00004-of-00004.safetensors", …}}
    pytorch_model.bin.index.json      the same for torch.save's files
    optimizer.safetensors.index.json  the same, with more keys beside the map (PaddleNLP)

Sources: transformers 5.23, PaddleNLP 3.0.0b4 ``trainer/unified_checkpoint``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench.core.place import Place
from workbench.errors import CorruptError, MissingFileError

__all__ = ["WeightIndex", "check_files", "read_index"]


@dataclass(frozen=True)
class WeightIndex:
    """One index.

    Attributes:
        name: of its file.
        weights: tensor → file.
        facts: what else it says.
    """

    name: str
    weights: Mapping[str, str]
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def files(self) -> list[str]:
        """The distinct files that it names, sorted."""
        return sorted(set(self.weights.values()))


def read_index(place: Place, name: str) -> WeightIndex:
    """Read an index; whether its files are there is for :func:`check_files`.

    Raises:
        CorruptError: not JSON, or without a map of names to names.
    """
    document = place.read_json(name)
    weights = document.pop("weight_map", None) if isinstance(document, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(file, str) for file in weights.values()):
        raise CorruptError(f"index {name!r} has no weight_map of tensor names to file names")
    return WeightIndex(name, weights, document)


def check_files(place: Place, index: WeightIndex, *, remedy: str = "download or restore it") -> None:
    """Whether every file that the index names is there.

    Raises:
        MissingFileError: one is absent; says how many tensors it holds.
        UnsafeError: one is outside the folder.
    """
    for file in index.files:
        try:
            place.resolve(file)
        except MissingFileError:
            held = [name for name, where in index.weights.items() if where == file]
            raise MissingFileError(
                f"index {index.name!r} names the file {file!r}, which is absent from {place.path!r}; it holds "
                f"{len(held):,} of {len(index.weights):,} tensors, {held[0]!r} first: {remedy}"
            ) from None
