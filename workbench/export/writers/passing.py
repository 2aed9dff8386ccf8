"""Files beside Hugging Face weights that belong to the model, not to how it is stored: copied into the target."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from workbench.core.dtypes import ALL
from workbench.export.filemap import FileMap
from workbench.export.selection import ExportSelection
from workbench.export.values.fp8_config import configured

if TYPE_CHECKING:
    from workbench.export.hf.convert import Renamed

PASSED = re.compile(
    r"(?:config|generation_config|adapter_config|preprocessor_config|processor_config|tokenizer|tokenizer_config|"
    r"special_tokens_map|added_tokens|vocab|chat_template)\.json|(?:tokenizer|spiece|sentencepiece\.bpe)\.model|"
    r"merges\.txt|vocab\.txt|chat_template\.jinja"
)
MAX_PASSED = 256 << 20  #: bytes


def passed(selection: ExportSelection, notes: list[str], named: Renamed | None = None) -> list[FileMap]:
    """Return the source's small files; its ``config.json`` names the new element type if tensors are cast.

    Args:
        named: the renaming for Hugging Face, if any; ``config.json`` is then its result, or absent.
    """
    found = []
    if named is not None and named.config is not None:
        made = (json.dumps(named.config, indent=2, ensure_ascii=False) + "\n").encode()
        found.append(FileMap.of_bytes("config.json", _retyped(selection, made, notes), selection.dims))
    place = selection.ckpt.place.again()
    if place.file is not None:
        return found
    for name, stat in place.files.items():
        if name == "config.json" and named is not None:
            continue
        if PASSED.fullmatch(name) and stat.size <= MAX_PASSED:
            data = place.read(name)
            if name == "config.json":
                data = _retyped(selection, data, notes)
            found.append(FileMap.of_bytes(name, data, selection.dims))
    return found


def _retyped(selection: ExportSelection, data: bytes, notes: list[str]) -> bytes:
    """Return ``config.json`` with the types in which tensors are written; unchanged if it named others before."""
    stored = selection.catalog.dtype[selection.tensors].tolist()
    changed = {(ALL[a].name, ALL[b].name) for a, b in zip(stored, selection.codes.tolist(), strict=True) if a != b}
    try:
        config = json.loads(data)
    except ValueError:
        return data
    if not isinstance(config, dict):
        return data
    made = dict(config)
    if selection.edited is not None:
        made = configured(made, selection.edited, selection.names, selection.recipe)
    for key in ("torch_dtype", "dtype"):
        new = next((new for old, new in changed if made.get(key) == old and not new.startswith("float8")), None)
        if new is not None:
            made[key] = new
    if made == config:
        return data
    for key in sorted({*config, *made}):
        if config.get(key) != made.get(key):
            notes.append(f"config.json: {key} is now {_shown(made.get(key))}, was {_shown(config.get(key))}")
    return (json.dumps(made, indent=2, ensure_ascii=False) + "\n").encode()


def _shown(value: object) -> str:
    return (
        "absent"
        if value is None
        else str(value.get("quant_method", "other"))
        if isinstance(value, dict)
        else str(value)
    )
