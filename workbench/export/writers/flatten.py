"""Non-tensor state under flat names, as torch's distributed checkpoint flattens a state dict.

::

    {"optim": {"param_groups": [{"lr": 0.1, "betas": (0.9, 0.999)}]}}
        optim.param_groups.0.lr      path ("optim", "param_groups", 0, "lr")        0.1
        optim.param_groups.0.betas   path ("optim", "param_groups", 0, "betas")     (0.9, 0.999)

Dicts are always flattened, lists if they contain a dict or a tensor, tuples never.

Source: torch 2.13 ``torch/distributed/checkpoint/_traverse.py`` (``traverse_state_dict``).
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from workbench.core.dtypes import by_name
from workbench.export.filemap import Literal
from workbench.export.writers.plain import is_tensor


@dataclass(frozen=True, eq=False)
class FlatLeaf:
    """A value, its flat name, and the dict keys and list positions that lead to it."""

    key: str
    path: tuple[str | int, ...]
    value: Any

    @cached_property
    def literal(self) -> Literal | None:
        """A tensor as a piece of known bytes; ``None`` for any other value."""
        if not is_tensor(self.value):
            return None
        import torch

        tensor = self.value.detach().cpu().contiguous()
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        return Literal(self.key, by_name(tensor.dtype), tuple(tensor.shape), raw)


def flatten(objects: Mapping[str, Any]) -> list[FlatLeaf]:
    """Return the leaves of plain values; an empty dict is a leaf."""
    return [FlatLeaf(".".join(map(str, path)), path, value) for path, value in _leaves((), dict(objects)) if path]


def archive(value: Any) -> bytes:
    """Store a plain value as torch does."""
    import torch

    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def _leaves(path: tuple[str | int, ...], value: Any) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves((*path, str(key)), inner)
    elif isinstance(value, list) and not _closed(value):
        for at, inner in enumerate(value):
            yield from _leaves((*path, at), inner)
    else:
        yield path, value


def _closed(value: list[Any]) -> bool:
    """Return whether a list is stored as one value."""
    return not any(
        isinstance(one, dict) or is_tensor(one) or (isinstance(one, list) and not _closed(one)) for one in value
    )
