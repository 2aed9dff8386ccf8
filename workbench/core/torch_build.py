"""torch's rebuild functions, with a `TensorRef` where torch would make a tensor.

::

    ('storage', FloatStorage, '0', 'cpu', 24)   persistent id  → torch_storage  → StorageRef
    _rebuild_tensor_v2(storage, 0, (4, 6), (6, 1), False, OrderedDict())        → TensorRef
    _rebuild_parameter(tensor, True, OrderedDict())                             → TensorRef, kind Parameter
    _rebuild_from_type_v2(function, cls, args, state)                           → the same, with attributes

Read from torch 2.13 (``torch/_utils.py``, ``torch/_tensor.py``, ``torch/serialization.py``). All raise
TypeError or ValueError for arguments that torch never writes.
"""

from __future__ import annotations

from typing import Any, cast

from workbench.core.stubs import Call, DTypeRef, Opaque, StorageRef, StorageType, TensorRef, opaque_class, short

__all__ = ["from_type", "parameter", "size", "tensor", "tensor_v2", "tensor_v3", "torch_storage"]


def torch_storage(pid: object) -> StorageRef:
    """The storage behind a persistent id of torch.save: ``('storage', class, key, location, numel[,
    view])``.
    """
    if type(pid) is not tuple or len(pid) not in (5, 6) or pid[0] != "storage" or not isinstance(pid[1], StorageType):
        raise ValueError(f"{short(pid)} is no storage")
    _, kind, key, location, numel = pid[:5]
    if type(key) is not str or type(location) is not str or type(numel) is not int or not 0 <= numel < 1 << 63:
        raise ValueError(f"{short(pid)} is no storage")
    view = pid[5] if len(pid) == 6 else None
    if view is not None and not (
        type(view) is tuple
        and len(view) == 3
        and type(view[0]) is str
        and type(view[1]) is int
        and view[1] >= 0
        and type(view[2]) is int
        and view[2] >= 0
    ):
        raise ValueError(f"{short(view)} is no view of a storage")
    return StorageRef(kind.dtype, key, location, numel, view)


def tensor(storage: object, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> TensorRef:
    dtype: Any = getattr(storage, "dtype", None)  # TensorRef refuses what is no name
    return TensorRef(storage, dtype, offset, size, stride)


def tensor_v2(
    storage: object,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool = False,
    hooks: object = None,
    metadata: object = None,
) -> TensorRef:
    attrs = {"metadata": metadata} if metadata else None  # {'conj': True}: the bits mean something else then
    dtype: Any = getattr(storage, "dtype", None)
    return TensorRef(storage, dtype, offset, size, stride, requires_grad, attrs)


def tensor_v3(
    storage: object,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool = False,
    hooks: object = None,
    dtype: object = None,
    metadata: object = None,
) -> TensorRef:
    if not isinstance(dtype, DTypeRef):
        raise TypeError("_rebuild_tensor_v3 without a dtype")
    return TensorRef(
        storage, dtype.name, offset, size, stride, requires_grad, {"metadata": metadata} if metadata else None
    )


def parameter(data: object, requires_grad: bool = True, hooks: object = None, state: object = None) -> object:
    if not isinstance(data, TensorRef):
        return opaque_class("torch.nn.parameter", "Parameter")(data)
    return data.replace(
        requires_grad=requires_grad,
        attrs=data.attrs | _attributes(state),
        kind="torch.nn.parameter.Parameter",
    )


def from_type(function: object, new_type: object, args: object, state: object = None) -> object:
    if type(args) is not tuple or not (
        isinstance(function, Call) or (isinstance(function, type) and issubclass(function, Opaque))
    ):
        raise TypeError("_rebuild_from_type_v2 of something else than a rebuild function")
    made = function(*args)
    if isinstance(made, TensorRef):
        kind = (
            f"{new_type.module}.{new_type.qualname}"
            if isinstance(new_type, type) and issubclass(new_type, Opaque)
            else None
        )
        return made.replace(attrs=made.attrs | _attributes(state), kind=kind)
    if isinstance(made, Opaque):
        made.__setstate__(state)
    return made


def size(items: object = ()) -> tuple[object, ...]:
    if type(items) not in (tuple, list) or any(type(n) is not int for n in cast(tuple[object, ...], items)):
        raise TypeError("torch.Size of something else than whole numbers")
    return tuple(cast(tuple[object, ...], items))


def _attributes(state: object) -> dict[str, object]:
    parts = state if type(state) is tuple else (state,)
    return {key: value for part in parts if type(part) is dict for key, value in part.items() if type(key) is str}
