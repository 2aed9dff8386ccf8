"""A folder of ``torch.save`` weights, as written by Hugging Face's libraries before safetensors.

::

    pytorch_model.bin.index.json                 {"weight_map": {"lm_head.weight": "pytorch_model-00002-…bin"}}
    pytorch_model-00001-of-00002.bin             one flat state_dict each; a file may hold more than the index lists
    pytorch_model-00002-of-00002.bin
    pytorch_model.bin                            or all in one file, without an index

Source: transformers 5.23 (``.bin`` index).
"""

from __future__ import annotations

from collections import defaultdict

from workbench.core.build import CatalogBuilder
from workbench.core.catalog import Catalog
from workbench.core.pickles.standins import TensorRef
from workbench.core.place import Place
from workbench.core.words import some_of
from workbench.errors import CorruptError, NotACheckpointError
from workbench.formats.safetensors.weight_index import check_files, read_index
from workbench.formats.torch.file import declare, keyed, load_tree
from workbench.formats.torch.tree import is_quantised, is_sparse_part

INDEX = ".bin.index.json"
WHOLE = ("pytorch_model.bin", "adapter_model.bin", "diffusion_pytorch_model.bin")  #: files that identify a folder


def read_folder(place: Place) -> Catalog:
    """Return the catalog of the tensors in the index, or in the single file.

    Raises:
        CorruptError, TruncatedError: a file is damaged, or the index contradicts the files.
        MissingFileError: a file that the index names is missing.
        UnsafeError: the index names a file outside the folder.
    """
    notes: list[str] = []
    builder = CatalogBuilder("torch_save", place)
    name = next((name for name in sorted(place.files, key=len) if name.endswith(INDEX)), None)
    if name is None:
        whole = next((name for name in WHOLE if name in place.files), None)
        if whole is None:
            raise NotACheckpointError(f"{place.path!r} has neither *{INDEX} nor one of {', '.join(WHOLE)}")
        refs = _add_file(builder, whole, None, "", notes)
    else:
        index = read_index(place, name)
        check_files(place, index)
        builder.file(name, metadata=True)
        listed: dict[str, list[str]] = defaultdict(list)
        for key, file in index.weights.items():
            listed[file].append(key)
        refs = {}
        for file in index.files:
            refs |= _add_file(builder, file, listed[file], name, notes)
    quantised = dict.fromkeys((key for key, ref in refs.items() if is_quantised(ref)), "")
    sparse = dict.fromkeys((key for key, ref in refs.items() if is_sparse_part(ref)), "")
    return builder.build({"step": None, "notes": notes, "quantised": quantised, "sparse": sparse})


def _add_file(
    builder: CatalogBuilder, file: str, listed: list[str] | None, index: str, notes: list[str]
) -> dict[str, TensorRef]:
    """Declare the listed tensors of one file (all without an index), and return them."""
    loaded = load_tree(builder.place, file)
    builder.file(file, metadata=True, end=loaded.stop)
    tensors = keyed(loaded, repr(file), notes)
    for key in tensors if listed is None else listed:
        if key not in tensors:
            raise CorruptError(f"index {index!r} maps tensor {key!r} to {file!r}, which lacks it")
        declare(builder, file, key, tensors[key][1], loaded, notes)
    extra = sorted(tensors.keys() - listed) if listed is not None else []
    if extra:
        notes.append(f"{len(extra)} tensors of {file!r} that the index does not list are left out: {some_of(extra, 5)}")
    return {key: tensors[key][1] for key in (tensors if listed is None else listed)}
