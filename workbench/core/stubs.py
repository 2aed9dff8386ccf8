"""What a decoded pickle is made of: inert stand-ins for the classes and functions that it names.

A pickle names globals and tells the unpickler to call them, to give them state and to fill them with items::

    GLOBAL torch._utils _rebuild_tensor_v2   →  Call("…", a function of ours) → TensorRef      below
    GLOBAL torch bfloat16                    →  DTypeRef("bfloat16")                           below
    GLOBAL numpy dtype                       →  NumpyDType, NumpyArray                         numpy_stubs.py
    GLOBAL my.lib Config                     →  a fresh subclass of Opaque    → args, state    inert.py

All of them can be imported from here. Why none of them can be made to run or change anything: inert.py.
"""

from __future__ import annotations

from typing import Any

from workbench.core.inert import Call, Inert, Opaque, PickledDict, Record, opaque_class, short
from workbench.core.numpy_stubs import NumpyArray, NumpyDType

__all__ = [
    "Call",
    "DTypeRef",
    "Inert",
    "NumpyArray",
    "NumpyDType",
    "Opaque",
    "PickledDict",
    "Record",
    "StorageRef",
    "StorageType",
    "TensorRef",
    "opaque_class",
    "short",
]

MAX_DIMS = 64  # torch's own limit


class DTypeRef(Inert):
    """A dtype by its torch name, such as ``bfloat16``."""

    __slots__ = ("name",)
    name: str

    def __init__(self, name: str) -> None:
        self._set(name=name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DTypeRef) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"torch.{self.name}"


class StorageType(Inert):
    """A storage class: its dtype's torch name, or None when untyped (then sizes are in bytes)."""

    __slots__ = ("dtype",)
    dtype: str | None

    def __init__(self, dtype: str | None) -> None:
        self._set(dtype=dtype)

    def __repr__(self) -> str:
        return f"<storage of {self.dtype or 'bytes'}>"


class StorageRef(Inert):
    """One storage of a torch.save file: ``numel`` counts elements of ``dtype``, or bytes when ``dtype`` is
    None.

    ``view`` is the legacy format's (key, offset, numel) of a storage that lies inside another one, else None.
    """

    __slots__ = ("dtype", "key", "location", "numel", "view")
    dtype: str | None
    key: str
    location: str
    numel: int
    view: tuple[str, int, int] | None

    def __init__(
        self, dtype: str | None, key: str, location: str, numel: int, view: tuple[str, int, int] | None = None
    ) -> None:
        self._set(dtype=dtype, key=key, location=location, numel=numel, view=view)

    def __repr__(self) -> str:
        return f"<storage {self.key!r} of {self.numel} {self.dtype or 'bytes'}>"


class TensorRef(Inert):
    """A tensor that was not read: where it lies in which storage.

    ``storage`` is what ``persistent_load`` returned; ``storage_offset`` and ``stride`` count elements.
    ``kind`` names a subclass (``torch.nn.parameter.Parameter``) or is None; ``attrs`` are the Python
    attributes that the file keeps with it (Megatron's ``partition_dim``), inert values only.
    """

    __slots__ = ("attrs", "dtype", "kind", "requires_grad", "shape", "storage", "storage_offset", "stride")
    storage: Any
    dtype: str
    storage_offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool
    attrs: dict[str, object]
    kind: str | None

    def __init__(
        self,
        storage: object,
        dtype: str,
        storage_offset: int,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        requires_grad: bool = False,
        attrs: dict[str, object] | None = None,
        kind: str | None = None,
    ) -> None:
        if type(dtype) is not str:
            raise ValueError("a tensor's storage has no dtype")
        if type(shape) is not tuple or type(stride) is not tuple or len(shape) != len(stride) or len(shape) > MAX_DIMS:
            raise ValueError("a tensor's shape and stride do not fit each other")
        for number in (storage_offset, *shape, *stride):
            if type(number) is not int or not 0 <= number < 1 << 63:
                raise ValueError("a tensor's shape, stride or offset is no size")
        set_ = object.__setattr__  # this constructor is hot: once a tensor
        set_(self, "storage", storage)
        set_(self, "dtype", dtype)
        set_(self, "storage_offset", storage_offset)
        set_(self, "shape", shape)
        set_(self, "stride", stride)
        set_(self, "requires_grad", requires_grad is True)
        set_(self, "attrs", {} if attrs is None else attrs)
        set_(self, "kind", kind)

    def replace(self, **changes: Any) -> TensorRef:
        """A copy with some fields changed."""
        return TensorRef(**{name: getattr(self, name) for name in TensorRef.__slots__} | changes)

    def __repr__(self) -> str:
        return f"<tensor {self.dtype} {list(self.shape)}>"
