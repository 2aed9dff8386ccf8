"""Files beside Hugging Face weights that belong to the model, not to how it is stored: copied into the target."""

from __future__ import annotations

import json
import re

from workbench.core.dtypes import ALL
from workbench.core.place import Place
from workbench.reshard.filemap import FileMap, no_pieces
from workbench.reshard.selection import Selection

__all__ = ["literal_file", "passed"]

PASSED = re.compile(
    r"(?:config|generation_config|adapter_config|preprocessor_config|processor_config|tokenizer|tokenizer_config|"
    r"special_tokens_map|added_tokens|vocab|chat_template)\.json|(?:tokenizer|spiece|sentencepiece\.bpe)\.model|"
    r"merges\.txt|vocab\.txt|chat_template\.jinja"
)
MAX_PASSED = 256 << 20  #: bytes


def passed(selection: Selection, notes: list[str]) -> list[FileMap]:
    """The source's small files; its ``config.json`` names the new element type where tensors are cast."""
    place = Place(selection.ckpt.path)
    if place.file is not None:
        return []
    found = []
    for name, stat in place.files.items():
        if PASSED.fullmatch(name) and stat.size <= MAX_PASSED:
            data = place.read(name)
            if name == "config.json":
                data = _retyped(selection, data, notes)
            found.append(literal_file(name, data, selection.catalog.shape.shape[1]))
    return found


def literal_file(name: str, data: bytes, dims: int) -> FileMap:
    """A file of bytes that are known, beside pieces of ``dims`` padded axes."""
    none = no_pieces(dims)
    return FileMap(name, len(data), ((0, data),), none, none.ndim)


def _retyped(selection: Selection, data: bytes, notes: list[str]) -> bytes:
    """``config.json`` with the type that tensors were cast to; unchanged where it named another to begin with."""
    stored = selection.catalog.dtype[selection.tensors].tolist()
    changed = {(ALL[a].name, ALL[b].name) for a, b in zip(stored, selection.codes.tolist(), strict=True) if a != b}
    try:
        config = json.loads(data)
    except ValueError:
        return data
    for key in ("torch_dtype", "dtype"):
        new = next((new for old, new in changed if isinstance(config, dict) and config.get(key) == old), None)
        if new is not None:
            notes.append(f"config.json: {key} is {new} now, was {config[key]}")
            config[key] = new
            data = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
    return data
