"""Split the object tree of a ``torch.save`` file into tensors by path and the rest.

::

    {"model": {"fc.weight": T},                      model.fc.weight       path ("model", "fc.weight")
     "optim": {"state": {0: {"exp_avg": T}},   ──▶   optim.state.0.exp_avg
               "param_groups": [{"lr": 0.1}]},       objects: {"optim": {"param_groups": [{"lr": 0.1}]}, "epoch": 3}
     "epoch": 3}

List positions become numbers. Instances of foreign classes are searched if they have dicts: a module that was saved as
an object shows its parameters under the names of its ``state_dict``. A quantized tensor becomes the result of
``int_repr()``, with its scale and zero point; a sparse one becomes its indices and values, with its shape::

    q = quantize_per_tensor(…)      q.int_repr                                      objects: {"q": {"scale": 0.1, …}}
    q = quantize_per_channel(…)     q.int_repr  q.q_per_channel_scales  q.q_per_channel_zero_points
    s = sparse_coo_tensor(…)        s.indices  s.values                             objects: {"s": {"shape": (9, 4), …}}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from workbench.core.pickles import budget
from workbench.core.pickles.budget import GONE, leaves
from workbench.core.pickles.standins import FAULTS, Opaque, StorageRef, TensorRef

_MODULE_DICTS = ("_parameters", "_buffers", "_modules")  #: where nn.Module keeps the contents of state_dict
_SPARSE = ("_rebuild_sparse_tensor", "_rebuild_sparse_csr_tensor")
_ROWS, _COLUMNS = ("crow_indices", "col_indices", "values"), ("ccol_indices", "row_indices", "values")
_PARTS = {
    "sparse_csr": _ROWS,
    "sparse_bsr": _ROWS,
    "sparse_csc": _COLUMNS,
    "sparse_bsc": _COLUMNS,
}  #: torch's accessors
_LAYOUTS = ("sparse_coo", *_PARTS)
_INTEGERS = {"qint8": "int8", "quint8": "uint8", "qint32": "int32"}  #: quantized type → type of ``int_repr()``


def flatten(tree: object, *, what: str, dtensors: bool = False) -> list[tuple[tuple[Any, ...], Any]]:
    """Return every tensor with the dict keys and list positions that lead to it, in the tree's order.

    Args:
        what: the file, for messages.
        dtensors: return DTensors as they are (see :func:`is_dtensor`) instead of the tensors that they consist of.

    Raises:
        CorruptError: the tree is nested too deeply, or contains itself.
        UnsafeError: shared references would make the list endless, or names are far larger than the file.
    """
    whole: tuple[type, ...] = (TensorRef,)
    return leaves(tree, _children, lambda n: isinstance(n, whole) or (dtensors and is_dtensor(n)), what=what)


def is_dtensor(node: object) -> bool:
    """Return whether a node is a DTensor: a wrapper subclass around the local tensor of the rank that saved it."""
    if not isinstance(node, Opaque) or node.qualname != "_rebuild_wrapper_subclass":
        return False
    states = node.state if isinstance(node.state, tuple) else (node.state,)
    return any(isinstance(state, dict) and "_local_tensor" in state and "_spec" in state for state in states)


def is_quantised(ref: TensorRef) -> bool:
    """Return whether a tensor holds a quantized tensor's codes; its other facts are in the objects (:func:`prune`)."""
    return isinstance(ref.storage, StorageRef) and (ref.storage.dtype or "").startswith(("qint", "quint"))


def is_sparse_part(ref: TensorRef) -> bool:
    """Return whether a tensor is a part of a sparse one, whose shape and layout are in the objects (:func:`prune`)."""
    return ref.kind in _LAYOUTS


def prune(tree: object, *, what: str) -> object:
    """Return the tree without tensors or containers of only tensors; ``None`` if nothing is left."""
    return budget.prune(tree, _kept, what=what)


def optimizers(tree: object, *, depth: int = 3) -> Iterator[tuple[tuple[Any, ...], Mapping[Any, Any]]]:
    """Yield the ``state_dict`` of each optimizer in the tree, with its path."""
    stack: list[tuple[tuple[Any, ...], object]] = [((), tree)]
    while stack:
        path, node = stack.pop(0)
        if isinstance(node, dict) and isinstance(node.get("state"), dict) and _is_groups(node.get("param_groups")):
            yield path, node
        elif len(path) < depth and isinstance(node, (dict, list, tuple)) and len(node) <= 1000:
            stack += [((*path, key), child) for key, child in _named(node) if isinstance(child, (dict, list, tuple))]


def _is_groups(groups: object) -> bool:
    return isinstance(groups, list) and all(isinstance(group, dict) for group in groups)


def _children(node: object) -> Iterator[tuple[Any, object]] | None:
    """Return named children of a node that can have some; the path skips a level named ``None``."""
    return _named(node) if isinstance(node, (dict, list, tuple, Opaque)) else None


def _named(node: object) -> Iterator[tuple[Any, object]]:
    if isinstance(node, dict):
        yield from node.items()
    elif isinstance(node, (list, tuple)):
        yield from enumerate(node)
    elif isinstance(node, Opaque):
        if sparse := _sparse(node):
            yield from sparse[0].items()
            return
        if quantised := _quantised(node):
            yield from quantised[0].items()
            return
        if node.qualname == "Parameter" and len(node.args) == 1 and isinstance(node.args[0], Opaque):
            yield None, node.args[0]
            return
        for state in node.state if isinstance(node.state, tuple) else (node.state,):
            if isinstance(state, dict):
                for key, child in state.items():
                    yield (None if key in _MODULE_DICTS and isinstance(child, dict) else key), child
        yield from node.pairs
        yield from enumerate(node.items)
        yield from (pair for pair in (("args", node.args), ("kwargs", node.kwargs)) if pair[1])


def _layout(node: object) -> str:
    """Return the name of a sparse layout, such as ``sparse_csr``; empty for any other node."""
    name = node.args[0] if isinstance(node, Opaque) and node.qualname == "layout" and node.args else None
    return name.removeprefix("torch.") if isinstance(name, str) else ""


def _sparse(node: Opaque) -> tuple[dict[str, object], dict[str, object]] | None:
    """Return the tensors and other facts of a sparse tensor; ``None`` if the node is not one.

    Source: torch 2.13 ``_utils.py``, ``_rebuild_sparse_tensor``; older files lack ``is_coalesced``.
    """
    if node.qualname not in _SPARSE or len(node.args) != 2 or not isinstance(node.args[1], tuple):
        return None
    layout, data = _layout(node.args[0]), node.args[1]
    names = _PARTS.get(layout, ("indices", "values"))
    parts = {
        name: part.replace(kind=layout) if isinstance(part, TensorRef) else part
        for name, part in zip(names, data, strict=False)
    }
    facts = zip(("shape", "is_coalesced"), data[len(names) :], strict=False)
    return parts, {"layout": layout, **dict(facts)}


def _quantised(node: Opaque) -> tuple[dict[str, TensorRef], dict[str, object]] | None:
    """Return the tensors and other facts of a quantized tensor; ``None`` if the node is not one."""
    if node.qualname != "_rebuild_qtensor" or len(node.args) < 5:
        return None
    args: tuple[Any, ...] = node.args
    storage, offset, shape, stride, params = args[:5]
    if not isinstance(storage, StorageRef) or not isinstance(params, tuple) or not params:
        return None
    packed = storage.dtype not in _INTEGERS  # several elements per byte: raw bytes
    try:
        where = (0, (storage.numel,), (1,)) if packed else (offset, shape, stride)
        ref = TensorRef(storage, _INTEGERS.get(storage.dtype or "", "uint8"), *where)
    except FAULTS:
        return None
    if packed and (offset != 0 or not storage.dtype):
        return None
    parts = {"int_repr": ref}
    scheme = getattr(params[0], "qualname", None)
    facts: dict[str, object] = {"dtype": storage.dtype, "qscheme": scheme, "shape": shape}
    if scheme == "per_tensor_affine" and len(params) == 3:
        facts |= {"scale": params[1], "zero_point": params[2]}
    elif len(params) == 4 and isinstance(params[1], TensorRef) and isinstance(params[2], TensorRef):
        parts |= {"q_per_channel_scales": params[1], "q_per_channel_zero_points": params[2]}
        facts["axis"] = params[3]
    else:
        return None
    return parts, facts


def _kept(node: object) -> object:
    if isinstance(node, TensorRef):
        return GONE
    if not isinstance(node, Opaque):
        return node
    data = node.args[0] if node.qualname == "Parameter" and len(node.args) == 1 else node
    if is_dtensor(data):
        return GONE
    parts = (_sparse(data) or _quantised(data)) if isinstance(data, Opaque) else None
    return parts[1] if parts and all(isinstance(part, TensorRef) for part in parts[0].values()) else node
