"""Non-tensor state that can be written: numbers, texts, arrays, and containers of them, never an object with code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from workbench.errors import WorkbenchError

DEPTH = 64  #: nesting limit; deeper containers, and those that contain themselves, are not written


def plain_objects(
    objects: Mapping[str, Any], names: Iterable[str], *, tensors: bool
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the checkpoint's objects that can be written, and why the others cannot.

    Args:
        names: which ones.
        tensors: whether the target has a place for tensors inside of objects.
    """
    kept: dict[str, Any] = {}
    left: dict[str, str] = {}
    for name in names:
        try:
            kept[name] = plain(objects[name], tensors=tensors)
        except (WorkbenchError, ValueError) as error:
            left[name] = str(error)
    return kept, left


def plain(value: Any, *, tensors: bool = False, depth: int = DEPTH) -> Any:
    """Copy a value as ``None``, bool, int, float, str, bytes, list, tuple, set and dict; arrays become tensors.

    Raises:
        ValueError: the value contains something else; the message names its class.
    """
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return value
    if not depth:
        raise ValueError(f"its containers are nested more than {DEPTH} deep")
    if isinstance(value, np.generic):
        return plain(value.item(), depth=depth - 1)
    if isinstance(value, dict):
        return {plain(k, depth=depth - 1): plain(v, tensors=tensors, depth=depth - 1) for k, v in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(plain(one, tensors=tensors, depth=depth - 1) for one in value)
    if tensors and (isinstance(value, np.ndarray) or is_tensor(value)):
        import torch

        try:  # a copy: decoded arrays are read-only, which torch warns of
            return torch.from_numpy(np.array(value)) if isinstance(value, np.ndarray) else value.clone()
        except TypeError as error:  # of objects, texts, or another byte order
            raise ValueError(f"it contains an array that torch does not support: {error}") from None
    cls = type(value)
    raise ValueError(f"it contains a {cls.__module__}.{cls.__qualname__}, which is not a plain value")


def is_tensor(value: Any) -> bool:
    """Return whether a value is a torch tensor, without importing torch: a tensor's class was imported with it."""
    return type(value).__module__ == "torch" and type(value).__name__ == "Tensor"
