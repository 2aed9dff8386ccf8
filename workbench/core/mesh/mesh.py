"""A mesh: ranks on named axes, numbered row by row with the first axis outermost, as ``torch`` ``DeviceMesh`` does.

::

    Mesh(dp=2, tp=3)         tp 0   1   2       rank 4 has the coordinate dp=1, tp=1
                    dp 0      0   1   2         the group of rank 4 along tp: 3 4 5
                       1      3   4   5         …                    along dp: 1 4

Megatron names its order with the fastest axis first (``tp-cp-ep-dp-pp``); :meth:`Mesh.megatron` writes the same
numbering down: ``Mesh(pp=…, dp=…, cp=…, tp=…)``.

Sources: torch 2.13 ``distributed/device_mesh.py``; megatron-core 0.16.1 ``core/parallel_state.py`` (``RankGenerator``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from workbench.core.arrays import Ints
from workbench.core.words import plural
from workbench.errors import UsageError

MAX_RANKS = 1 << 20  #: more ranks than this are a typing error


class Mesh:
    """Named axes and their sizes. Immutable; two meshes are equal if their axes have the same names, sizes and order.

    >>> mesh = Mesh(dp=2, tp=3)
    >>> mesh.coordinate(4)
    {'dp': 1, 'tp': 1}
    >>> mesh.rank(dp=1, tp=1)
    4

    Attributes:
        axes: the names, outermost first.
        shape: their sizes.
    """

    axes: tuple[str, ...]
    shape: tuple[int, ...]

    def __init__(self, **sizes: int) -> None:
        """Create a mesh from axis sizes, as in ``Mesh(dp=2, tp=4)``; the first axis is the outermost. ``Mesh()`` is one
        rank.

        Raises:
            UsageError: a size is not a whole number of 1 or more, or there are more than :data:`MAX_RANKS` ranks.
        """
        for name, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise UsageError(f"mesh axis {name!r} has size {size!r}; sizes are whole numbers, 1 or more")
        if prod(sizes.values()) > MAX_RANKS:
            raise UsageError(
                f"a mesh of {plural(prod(sizes.values()), 'rank')} is larger than {MAX_RANKS:,}; check the sizes"
            )
        self.axes, self.shape = tuple(sizes), tuple(sizes.values())

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Parse a mesh from ``"dp=2,tp=4"``, as on the command line; an empty string is one rank.

        Raises:
            UsageError: the text does not have that form, or an axis is named twice.
        """
        sizes: dict[str, int] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            found = re.fullmatch(r"([A-Za-z_]\w*)\s*=\s*(\d{1,9})", part)
            if found is None:
                raise UsageError(
                    f"{part!r} is not a mesh axis; write a mesh as 'dp=2,tp=4', with the outermost axis first"
                )
            if found[1] in sizes:
                raise UsageError(f"mesh axis {found[1]!r} is named twice in {text!r}")
            sizes[found[1]] = int(found[2])
        return cls(**sizes)

    @classmethod
    def of(cls, mesh: Mesh | Mapping[str, int] | str) -> Mesh:
        """Create a mesh from ``{"dp": 2, "tp": 4}`` or ``"dp=2,tp=4"``; a mesh is returned unchanged. Raises as
        :meth:`parse`.
        """
        if isinstance(mesh, str):
            return cls.parse(mesh)
        return cls(**mesh) if isinstance(mesh, Mapping) else mesh

    @classmethod
    def megatron(cls, *, tp: int = 1, pp: int = 1, dp: int = 1, cp: int = 1, ep: int = 1) -> Mesh:
        """Number ranks as Megatron does (``tp-cp-ep-dp-pp``, tp fastest); ``dp`` counts replicas of a dense weight,
        without cp.

        Experts are spread over dp × cp ranks, so with ``ep`` these ranks form the axes ``dp`` (replicas of an expert)
        and ``ep``. Context-parallel ranks hold no weights of their own and are part of both.

        Raises:
            UsageError: ``ep`` does not divide ``dp · cp``.
        """
        if ep == 1:
            return cls(pp=pp, dp=dp, cp=cp, tp=tp)
        if ep < 1 or dp * cp % ep:
            raise UsageError(f"experts are spread over dp · cp = {dp * cp} ranks, which ep={ep} does not divide")
        return cls(pp=pp, dp=dp * cp // ep, ep=ep, tp=tp)

    @classmethod
    def like(cls, device_mesh: Any) -> Mesh:
        """Copy names and sizes of a ``torch.distributed.DeviceMesh``; ranks here are positions in it, row by row.

        Raises:
            UsageError: its axes have no names, so placements cannot be assigned to them.
        """
        names = device_mesh.mesh_dim_names
        if not names:
            raise UsageError("the DeviceMesh has no mesh_dim_names; give them to init_device_mesh")
        return cls(**dict(zip(names, map(int, device_mesh.shape), strict=True)))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return prod(self.shape)

    def size(self, axis: str) -> int:
        """Return the size of an axis; 1 for an axis that the mesh does not have."""
        return self.shape[self.axes.index(axis)] if axis in self.axes else 1

    def coordinates(self, ranks: Sequence[int] | Ints | None = None) -> Ints:
        """Return the coordinates of ranks, of all ranks by default, ``(R, axes)``.

        Raises:
            UsageError: a rank outside of the mesh.
        """
        ranks = np.arange(self.world_size) if ranks is None else np.asarray(ranks, np.int64).reshape(-1)
        outside = (ranks < 0) | (ranks >= self.world_size)
        if outside.any():
            raise UsageError(f"rank {int(ranks[outside][0])} is not in {self!r} of {self.world_size} ranks")
        found = np.empty((len(ranks), len(self.shape)), np.int64)
        step = self.world_size
        for position, size in enumerate(self.shape):
            step //= size
            found[:, position] = ranks // step % size
        return found

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return the coordinate of one rank by axis name."""
        return dict(zip(self.axes, self.coordinates([rank])[0].tolist(), strict=True))

    def rank(self, **coordinate: int) -> int:
        """Return the rank at a coordinate; axes that are not named are at 0.

        Raises:
            UsageError: an axis that the mesh does not have, or a coordinate beyond it.
        """
        found = 0
        for name in coordinate:
            self._position(name)
        for name, size in zip(self.axes, self.shape, strict=True):
            at = coordinate.get(name, 0)
            if not 0 <= at < size:
                raise UsageError(f"{name}={at} is outside {self!r}; coordinates start at 0")
            found = found * size + at
        return found

    def groups(self, *axes: str) -> Ints:
        """Return the process groups of ranks that differ only in these axes: ``(groups, members)``, members in rank
        order.

        Raises:
            UsageError: an axis that the mesh does not have.
        """
        mine = sorted(self._position(axis) for axis in axes)
        rest = [position for position in range(len(self.axes)) if position not in mine]
        ranks = np.arange(self.world_size).reshape(self.shape).transpose(*rest, *mine)
        return ranks.reshape(-1, prod(self.shape[position] for position in mine))

    def _position(self, axis: str) -> int:
        if axis not in self.axes:
            raise UsageError(f"mesh axis {axis!r} is not in {self!r}; it has {', '.join(self.axes) or 'none'}")
        return self.axes.index(axis)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and (self.axes, self.shape) == (other.axes, other.shape)

    def __hash__(self) -> int:
        return hash((self.axes, self.shape))

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in zip(self.axes, self.shape, strict=True))

    def __repr__(self) -> str:
        return f"Mesh({str(self).replace(',', ', ')})"
