"""torch's distributed checkpoint, loadable by ``torch.distributed.checkpoint`` unchanged.

::

    .metadata         pickle: every tensor's boxes, where each is, and the state dict's nesting
    __0_0.distcp      the chunks that rank 0 of the mesh writes; replicas are written by one rank
    __1_0.distcp      …

``planner_data`` describes the nesting of the state dict behind flat names. If a name is a parameter's with a container
before it (``model.…``) or an optimizer's state around it (``optim.state.….exp_avg``), that is recorded, as is a value
of the optimizer's groups (``optim.param_groups.0.lr``); other names are one key each, as in a flat dict.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from workbench.export.filemap import FileMap
from workbench.export.selection import ExportSelection
from workbench.export.writers.dcp_items import lay_out
from workbench.export.writers.dcp_metadata import metadata
from workbench.export.writers.flatten import FlatLeaf, flatten

Path = tuple[str | int, ...]
_GROUP = re.compile(r"param_groups\.(\d+)\.([^.]+)")


def dcp_files(selection: ExportSelection) -> list[FileMap]:
    """Return one file per rank, and ``.metadata``; all of ``selection.objects`` are included.

    Raises:
        UnsupportedFormatError: an element type that torch lacks or cannot load; names the tensor.
        UsageError: two tensors or objects of one name.
    """
    leaves = [leaf for leaf in flatten(selection.objects) if not _is_stored(selection, leaf)]
    items = lay_out(selection, leaves)
    paths = _paths(selection, [(leaf.key, leaf.path) for leaf in leaves])
    return [
        *items.maps,
        FileMap.of_bytes(".metadata", metadata(items.chunks, items.blobs, paths, selection.names), selection.dims),
    ]


def _is_stored(selection: ExportSelection, leaf: FlatLeaf) -> bool:
    """Return whether a tensor in the objects equals one of the selection's (Megatron's common step), bit for bit."""
    if leaf.literal is None or leaf.key not in selection.names:
        return False
    at = selection.names.index(leaf.key)
    if (selection.dtype_of(at), selection.shape_of(at)) != (leaf.literal.dtype, leaf.literal.shape):
        return False
    stored = selection.ckpt._tensor(int(selection.tensors[at]))
    return stored.element == leaf.literal.dtype and stored.numpy().tobytes() == leaf.literal.data


def _paths(selection: ExportSelection, objects: list[tuple[str, Path]]) -> dict[str, Path]:
    """Return nested paths if the names contain them, unless one would lead through another's value."""
    fqns, keys = selection.ckpt.fqns, selection.catalog.keys
    paths: dict[str, Path] = {}
    for name, t in zip(selection.names, selection.tensors.tolist(), strict=True):
        paths[name] = _split(name, fqns[t] if keys[t] == name else None)
    containers = {path[0] for path in paths.values() if len(path) > 1}
    for key, path in objects:
        head, _, rest = str(path[0]).partition(".")
        if rest and head in containers:
            group = _GROUP.fullmatch(rest)
            inner: Path = ("param_groups", int(group[1]), group[2]) if group else (rest,)
            path = (head, *inner, *path[1:])
        paths[key] = path
    return paths if _is_tree(paths.values()) else {name: (name,) for name in paths}


def _split(name: str, fqn: str | None) -> Path:
    """Split ``model.FQN`` and ``optim.state.FQN.exp_avg`` into paths."""
    head, found, state = name.partition(fqn) if fqn else ("", "", "")
    if found and head.count(".") == 1 and not state:
        return head[:-1], found
    if found and head.endswith(".state.") and head.count(".") == 2 and state[:1] == "." and state.count(".") == 1:
        return *head[:-1].split("."), found, state[1:]
    return (name,)


def _is_tree(paths: Iterable[Path]) -> bool:
    leaves = set(paths)
    return not any(path[:length] in leaves for path in leaves for length in range(1, len(path)))
