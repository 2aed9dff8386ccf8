"""Map tensors between checkpoints whose frameworks name and fuse weights differently.

``wb.name_map(a, b)`` finds, for each tensor of ``b``, the boxes of ``a`` that hold the same weight. ``.apply()``
returns ``a`` with the names and shapes of ``b``, by box arithmetic on the catalog: no weight is read or copied. What a
converter adds to a weight (GGUF: 1 to Gemma's norms) is added or subtracted when it is read.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

from workbench.checkpoint import Checkpoint, as_checkpoint
from workbench.core.decoding.values import shifted
from workbench.core.rebox import ComposedBox, Composition, compose
from workbench.names.frameworks import Geometry, Link, geometry, links
from workbench.names.gguf import Conversion, conversion

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class NameMap:
    """How the tensors of ``a`` form those of ``b``.

    Attributes:
        targets: one for each tensor of ``b`` that ``a`` holds completely, in the order of ``b``.
        only_a: keys of ``a`` that no tensor of ``b`` needs → the reason, if known.
        only_b: keys of ``b`` that ``a`` does not hold completely → the reason, if known.
        added: positions of tensors of ``a`` → the constant that was added to them in ``b``.
    """

    a: Checkpoint
    b: Checkpoint
    targets: list[Composition]
    only_a: dict[str, str]
    only_b: dict[str, str]
    added: dict[int, float] = field(default_factory=dict)

    @property
    def pairs(self) -> pd.DataFrame:
        """One row per tensor of ``b``: its key, the keys of ``a`` that form it, and the number of boxes."""
        import pandas as pd

        keys = self.a.catalog.keys
        rows = [(t.key, tuple(dict.fromkeys(keys[p.tensor] for p in t.pieces)), len(t.pieces)) for t in self.targets]
        return pd.DataFrame(rows, columns=["b", "a", "boxes"])

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain JSON: ``a b pairs only_a only_b``."""
        return {
            "a": self.a.path,
            "b": self.b.path,
            "pairs": [{"b": b, "a": list(a), "boxes": boxes} for b, a, boxes in self.pairs.itertuples(index=False)],
            "only_a": dict(self.only_a),
            "only_b": dict(self.only_b),
        }

    def apply(self) -> Checkpoint:
        """Return ``a`` with the names, shapes and splits of ``b``: a lazy checkpoint over the files of ``a``."""
        if not self.added:
            return self.a.derive(compose(self.a.catalog, self.targets))
        payloads = shifted(self.a.payloads, self.added)
        catalog = compose(payloads.catalog, self.targets)
        a = self.a
        return Checkpoint(a.place, catalog, a._pool, a.objects, a.notes, parent=a, payloads=payloads.over(catalog))

    def __repr__(self) -> str:
        return (
            f"<name map: {len(self.targets):,} of {len(self.b):,} tensors of {self.b.format} are in {self.a.format}; "
            f"{len(self.only_a):,} only there, {len(self.only_b):,} only here>"
        )


def name_map(a: Checkpoint | str | os.PathLike[str], b: Checkpoint | str | os.PathLike[str]) -> NameMap:
    """Map ``a``'s tensors to ``b``'s, by fqn, role and the conventions of both frameworks.

    Fused QKV and [gate; up], stacked layers and experts are cut and joined; wrapper prefixes and the spellings of norms
    are aligned; padded rows of a vocabulary are left out. If something is unknown (for example, neither checkpoint
    stores the number of query groups), the tensor is listed with the reason, never guessed.

    If one side is a GGUF, the changes of llama.cpp's converter for its architecture are undone or applied: permuted
    rows of q and k, 1 added to norms, stacked experts. No tensor of an unknown architecture is mapped.

    Args:
        a, b: checkpoints, or paths or URLs.
    """
    return mapped(as_checkpoint(a), as_checkpoint(b))


def mapped(a: Checkpoint, b: Checkpoint, *, plain: bool = False) -> NameMap:
    """Map names like :func:`name_map`; with ``plain``, assume that the converter of a GGUF changed only names."""
    mine, theirs = geometry(a.objects), geometry(b.objects)
    facts_a, facts_b = mine.filled(theirs), theirs.filled(mine)
    converted = (a.format == "gguf") != (b.format == "gguf")
    made = [conversion(c.objects, plain=plain) if converted and c.format == "gguf" else None for c in (a, b)]
    atoms: dict[tuple[str, str], list[tuple[int, Link]]] = defaultdict(list)
    only_a: dict[str, str] = {}
    for tensor, found in _all_links(a, facts_a, made[0], converted):
        if isinstance(found, str):
            only_a[a.catalog.keys[tensor]] = found
            continue
        for link in found:
            atoms[a.roles[tensor], link.atom].append((tensor, link))
    tied = converted and any(_tied(c) for c in (a, b))
    if tied and ("param", HEAD) not in atoms:
        atoms["param", HEAD] = atoms["param", EMBEDDING]

    targets: list[Composition] = []
    only_b: dict[str, str] = {}
    used: set[int] = set()
    added: dict[int, float] = {}
    for tensor, found in _all_links(b, facts_b, made[1], converted):
        key, shape = b.catalog.keys[tensor], b.catalog.shape_of(tensor)
        if isinstance(found, str):
            only_b[key] = found
            continue
        pieces: list[ComposedBox] = []
        for link in found:
            for source, link_a in atoms.get((b.roles[tensor], link.atom), ()):
                shared = _pieces(source, link_a, link)
                pieces += shared
                if shared and link.more != link_a.more:
                    added[source] = link.more - link_a.more
        have, want = sum(_volume(piece.sizes) for piece in pieces), _volume(shape)
        if have != want or (want == 0 and not pieces):
            known = f"only {have:,} of its {want:,} elements are stored" if have else ""
            only_b[key] = known
            continue
        used.update(piece.tensor for piece in pieces)
        targets.append(Composition(key, shape, pieces, b.fqns[tensor], b.roles[tensor]))
    for tensor, key in enumerate(a.catalog.keys):
        if tensor not in used:
            only_a.setdefault(key, "")
    for tensor, key in enumerate(b.catalog.keys):
        if b.fqns[tensor] is None:
            only_b.setdefault(key, "belongs to no named parameter")
    if tied and made[1] is not None:
        for t, key in enumerate(a.catalog.keys):
            if only_a.get(key) == "" and (a.fqns[t] or "").endswith(HEAD):
                only_a[key] = TIED
    return NameMap(a, b, targets, only_a, only_b, added)


TIED = "the embedding is used instead: the configuration ties them"
HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"


def _tied(ckpt: Checkpoint) -> bool:
    """Return whether a configuration ties the output to the embedding."""
    config = ckpt.objects.get("config")
    return isinstance(config, Mapping) and config.get("tie_word_embeddings") is True


def _all_links(
    ckpt: Checkpoint, facts: Geometry, made: Conversion | None, converted: bool
) -> Iterable[tuple[int, list[Link] | str]]:
    for tensor, fqn in enumerate(ckpt.fqns):
        if fqn is None:
            continue
        shape = ckpt.catalog.shape_of(tensor)
        if made is not None:
            yield tensor, made.links(ckpt.catalog.keys[tensor], shape)
            continue
        if converted:  # of a model with several towers, the converter takes the language model
            fqn = fqn.replace("language_model.", "")
        # a step counter has its parameter's name but not its shape
        yield tensor, links(fqn, shape, facts) if shape else [Link(fqn.removeprefix("model."), (), (), (), ())]


def _pieces(source: int, link_a: Link, link_b: Link) -> list[ComposedBox]:
    """Return the intersection of an atom's boxes in ``a`` and ``b``, as pieces of the target."""
    sizes_a = [link_a.sizes[axis] for axis in link_a.axes]
    sizes_b = [link_b.sizes[axis] for axis in link_b.axes]
    if len(sizes_a) != len(sizes_b):
        return []
    low = [max(x, y) for x, y in zip(link_a.at, link_b.at, strict=True)]
    high = [min(x + n, y + m) for x, n, y, m in zip(link_a.at, sizes_a, link_b.at, sizes_b, strict=True)]
    if any(b <= a for a, b in zip(low, high, strict=True)):
        return []
    every_a, every_b = (link.steps or (1,) * len(link.offsets) for link in (link_a, link_b))
    offsets, sizes = list(link_a.offsets), list(link_a.sizes)
    at = list(link_b.offsets)
    axes: list[int | None] = [None] * len(link_b.offsets)
    for k, (axis_a, axis_b) in enumerate(zip(link_a.axes, link_b.axes, strict=True)):
        offsets[axis_a] += (low[k] - link_a.at[k]) * every_a[axis_a]
        sizes[axis_a] = high[k] - low[k]
        at[axis_b] += (low[k] - link_b.at[k]) * every_b[axis_b]
        axes[axis_b] = axis_a
    # a box of the target has no steps: its elements along that axis become separate pieces
    strided = [axis for axis in range(len(at)) if every_b[axis] > 1 and axes[axis] is not None]
    if not strided:
        return [ComposedBox(source, tuple(offsets), tuple(sizes), tuple(at), tuple(axes), link_a.steps)]
    found = []
    for index in product(*(range(sizes[axes[axis] or 0]) for axis in strided)):
        begin, count, to = list(offsets), list(sizes), list(at)
        for axis, n in zip(strided, index, strict=True):
            along = axes[axis] or 0
            begin[along] += n * every_a[along]
            count[along] = 1
            to[axis] += n * every_b[axis]
        found.append(ComposedBox(source, tuple(begin), tuple(count), tuple(to), tuple(axes), link_a.steps))
    return found


def _volume(sizes: Iterable[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total
