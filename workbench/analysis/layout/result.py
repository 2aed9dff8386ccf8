"""The result of :func:`workbench.layout`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from workbench.analysis.layout import figures
from workbench.analysis.layout.coverage import Coverage
from workbench.analysis.layout.figures import Balance
from workbench.analysis.layout.holders import Holders
from workbench.analysis.layout.infer import Inferred
from workbench.analysis.layout.placed import InferredMesh, Placed
from workbench.core.catalog import Catalog
from workbench.core.near import no_such
from workbench.core.shown import Shown, above
from workbench.core.words import some_of
from workbench.errors import TensorNotFoundError, UsageError

if TYPE_CHECKING:
    import pandas as pd
    from panel.viewable import Viewer


@dataclass(frozen=True, eq=False)
class HolderView:
    """One holder: a rank, or the mesh coordinates in a file's name.

    Attributes:
        holder: its row in ``Layout.ranks``.
        rank: ``None`` if not stored.
        label: ``rank 3``, ``tp=0 pp=1`` or a file's name.
        coordinates: its known coordinates on the mesh.
        peers: by axis, the labels of holders that differ from it only on that axis, including itself, in order.
        nbytes: bytes of the chunks that it stores.
        pieces: one row per chunk: key role offsets sizes nbytes replica file start stop.
    """

    holder: int
    rank: int | None
    label: str
    coordinates: Mapping[str, int]
    peers: Mapping[str, list[str]]
    nbytes: int
    pieces: pd.DataFrame


BY = ("role", "dtype", "layer", "stage")


@dataclass(frozen=True, eq=False, repr=False)
class Layout(Shown):
    """Which rank, file and byte range stores each box of each tensor, and which placements that proves.

    Attributes:
        path, format: of the checkpoint.
        world_size: as stored, else ``None``.
        catalog: the tensors and chunks.
        fqns, roles: by tensor.
        holders: the ranks or files that stored the chunks.
        inferred: placements by tensor.
        covered: holes and overlaps.
    """

    path: str
    format: str
    world_size: int | None
    catalog: Catalog
    fqns: Sequence[str | None]
    roles: Sequence[str]
    holders: Holders
    inferred: Inferred
    covered: Coverage

    # ---- placements ----------------------------------------------------------------------------------------------

    @property
    def mesh(self) -> InferredMesh:
        """The mesh; as ``str``, ``axis0=2, axis1=2``; without axes if unknown. See ``mesh_source``."""
        return self.inferred.mesh

    @property
    def mesh_source(self) -> str:
        """Where the mesh comes from, as text."""
        return self.inferred.source

    def placed(self, key: str) -> Placed:
        """Return the placement of one tensor.

        Raises:
            TensorNotFoundError: no tensor has that name.
        """
        return self.inferred.placed[self.inferred.of_tensor[self._position(key)]]

    @cached_property
    def tensors(self) -> pd.DataFrame:
        """One row per tensor: key fqn role dtype shape nbytes placement status kind cut pieces holders copies why."""
        import pandas as pd

        catalog, of = self.catalog, self.inferred.of_tensor.tolist()
        placed = self.inferred.placed
        texts = [str(one) for one in placed]
        return pd.DataFrame(
            {
                "key": catalog.keys,
                "fqn": pd.array(list(self.fqns), dtype="str"),
                "role": pd.Categorical(self.roles),
                "dtype": [catalog.dtype_of(t).name for t in range(len(catalog))],
                "shape": [catalog.shape_of(t) for t in range(len(catalog))],
                "nbytes": catalog.tensor_nbytes,
                "placement": [texts[k] for k in of],
                "status": pd.Categorical([placed[k].status for k in of]),
                "kind": pd.Categorical([placed[k].kind for k in of]),
                "cut": [placed[k].cut for k in of],
                "pieces": [placed[k].pieces for k in of],
                "holders": figures.distinct(catalog.tensor, self.holders.of_chunk, len(catalog)),
                "copies": [placed[k].copies[1] for k in of],
                "why": [placed[k].why for k in of],
            }
        )

    def pieces(self, key: str) -> pd.DataFrame:
        """Return where the chunks of one tensor are stored: holder rank, axes, offsets sizes file start stop replica.

        Raises:
            TensorNotFoundError: no tensor has that name.
        """
        span = self.catalog.rows_of(self._position(key))
        rows = np.arange(span.start, span.stop)
        found = figures.chunk_rows(self.catalog, rows)[["offsets", "sizes", "file", "start", "stop", "replica"]]
        who = self.holders.of_chunk[rows]
        for at, axis in reversed(list(enumerate(self.mesh.axes))):
            if axis != "ranks":
                found.insert(0, axis, figures.known(self.inferred.places[who, at]))
        found.insert(0, "holder", [self.holders.label[k] for k in who.tolist()])
        return found

    # ---- the mesh ------------------------------------------------------------------------------------------------

    def rank(self, number: int | str) -> HolderView:
        """Return one rank, by its number, or by its label if ranks are not stored.

        Raises:
            UsageError: no such rank stored anything.
        """
        who, catalog = self.holders, self.catalog
        label = f"rank {number}" if isinstance(number, Integral) else number
        if label not in who.label:
            known = some_of(who.label, 8, str) or "none"
            raise UsageError(f"{label!r} stored nothing in {self.path!r}; data was stored by {known}")
        row = who.label.index(label)
        rows = np.flatnonzero(who.of_chunk == row)
        found = figures.chunk_rows(catalog, rows)
        found.insert(1, "role", [self.roles[t] for t in catalog.tensor[rows].tolist()])
        at = self.inferred.places[row]
        coordinates = {axis: int(at[k]) for k, axis in enumerate(self.mesh.axes) if at[k] >= 0 and axis != "ranks"}
        rank = int(who.rank[row]) if who.rank[row] >= 0 else None
        return HolderView(row, rank, label, coordinates, self._peers(row), int(found["nbytes"].sum()), found)

    @cached_property
    def ranks(self) -> pd.DataFrame:
        """One row per holder: label rank, one column per axis, files tensors chunks nbytes copies."""
        return figures.rank_frame(self.catalog, self.holders, self.mesh, self.inferred.places)

    @cached_property
    def files(self) -> pd.DataFrame:
        """One row per file: file size holders tensors chunks nbytes."""
        return figures.file_frame(self.catalog, self.holders)

    # ---- figures -------------------------------------------------------------------------------------------------

    def by(self, what: str) -> pd.DataFrame:
        """Return the bytes by ``role``, ``dtype``, ``layer`` or pipeline ``stage``: label tensors nbytes stored.

        Raises:
            UsageError: another word, or ``stage`` if no pipeline stage is stored.
        """
        if what not in BY:
            raise UsageError(f"bytes can be grouped by {', '.join(BY)}, not by {what!r}")
        catalog = self.catalog
        if what == "stage":
            return self._by_stage()
        names = figures.labels(catalog, self.fqns, self.roles, what)
        return figures.shares(names, catalog.tensor, catalog.chunk_nbytes, catalog.tensor_nbytes, what)

    @property
    def balance(self) -> Balance:
        """The distribution of bytes over the holders."""
        return figures.balance(self.ranks["nbytes"].to_numpy())

    @cached_property
    def holes(self) -> pd.DataFrame:
        """Boxes stored in no chunk: key offsets sizes numel."""
        return self.covered.frames(self.catalog)[0]

    @cached_property
    def overlaps(self) -> pd.DataFrame:
        """Boxes stored in two different chunks: key offsets sizes numel file_a file_b."""
        return self.covered.frames(self.catalog)[1]

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Counts and bytes in one dictionary."""
        status = [self.inferred.placed[k].status for k in self.inferred.of_tensor.tolist()]
        copies = int(self.catalog.chunk_nbytes[self.catalog.replica > 0].sum())
        balance = self.balance
        return {
            "tensors": len(self.catalog),
            "chunks": self.catalog.chunks,
            "holders": len(self.holders),
            "files": len(np.unique(self.catalog.file)),
            "world_size": self.world_size,
            "nbytes": int(self.catalog.tensor_nbytes.sum()),
            "stored": int(self.catalog.chunk_nbytes.sum()),
            "copies": copies,
            "balance": balance.ratio,
            "largest": balance.largest,
            **{name: status.count(name) for name in ("proven", "partly", "unknown")},
            "holes": len(self.covered.holes),
            "overlaps": len(self.covered.overlaps),
        }

    def placements(self) -> list[tuple[Placed, list[int]]]:
        """Return the distinct placements, each with its tensors, most bytes first."""
        found: dict[tuple[Any, ...], tuple[Placed, list[int]]] = {}
        texts = [(str(one), one.status, one.kind) for one in self.inferred.placed]
        for tensor, k in enumerate(self.inferred.of_tensor.tolist()):
            found.setdefault(texts[k], (self.inferred.placed[k], []))[1].append(tensor)
        nbytes = self.catalog.tensor_nbytes
        return sorted(found.values(), key=lambda one: (-int(nbytes[one[1]].sum()), str(one[0])))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values: path format mesh mesh_source summary ranks files tensors holes overlaps tangled.

        ``tangled``: tensors with too many overlaps or holes to search for holes.
        """
        import json

        def rows(frame: pd.DataFrame) -> Any:
            return json.loads(frame.to_json(orient="records"))

        mesh = dict(zip(self.mesh.axes, self.mesh.shape, strict=True))
        return {
            "path": self.path,
            "format": self.format,
            "mesh": mesh,
            "mesh_source": self.mesh_source,
            "summary": self.summary,
            "ranks": rows(self.ranks),
            "files": rows(self.files),
            "tensors": rows(self.tensors),
            "holes": rows(self.holes),
            "overlaps": rows(self.overlaps),
            "tangled": [self.catalog.keys[tensor] for tensor in self.covered.tangled],
        }

    def view(self) -> Viewer:
        """Return the pictures of the dashboard's Layout tab, for a notebook cell."""
        return cast("Viewer", above(self, "view")(self))

    # ---- inside --------------------------------------------------------------------------------------------------

    def _position(self, key: str) -> int:
        if key not in self.catalog.index:
            raise TensorNotFoundError(no_such(key, self.catalog.keys))
        return self.catalog.index[key]

    def _peers(self, row: int) -> dict[str, list[str]]:
        places = self.inferred.places
        found = {}
        for axis, name in enumerate(self.mesh.axes):
            rest = np.delete(np.arange(places.shape[1]), axis)
            peers = np.flatnonzero((places[:, rest] == places[row, rest]).all(axis=1) & (places[:, axis] >= 0))
            peers = peers[np.argsort(places[peers, axis], kind="stable")]
            if places[row, axis] >= 0 and self.mesh.shape[axis] > 1:
                found[name] = [self.holders.label[k] for k in peers.tolist()]
        return found

    def _by_stage(self) -> pd.DataFrame:
        import pandas as pd

        if "pp" not in self.mesh.axes:
            raise UsageError("no pipeline stage is stored in this checkpoint")
        stage = self.inferred.places[self.holders.of_chunk, self.mesh.axes.index("pp")]
        nbytes = self.catalog.chunk_nbytes
        found = []
        for at in sorted(set(stage.tolist())):
            mine = stage == at
            first = mine & (self.catalog.replica == 0)
            found.append(
                (
                    at if at >= 0 else pd.NA,
                    int(np.unique(self.catalog.tensor[mine]).size),
                    int(nbytes[first].sum()),
                    int(nbytes[mine].sum()),
                )
            )
        return pd.DataFrame(found, columns=["stage", "tensors", "nbytes", "stored"]).astype({"stage": "Int64"})
