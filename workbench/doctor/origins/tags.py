"""Which layout was misread, told by where rows or columns went and by what the tensors are called.

::

    rows of one other tensor       layer (E9) · expert (E10) · gate ↔ up (E3) · q, k, v (E4)
    rows of several                gate and up (E2) · q, k and v (E4)
    own rows or columns            vocabulary (F7 E11) · q, k, v (E4) · rotary halves (E5) · heads (E6) · ranks (E1)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from workbench.conventions import Geometry
from workbench.doctor.origins.atoms import kind_of, names_of
from workbench.doctor.origins.index import MovedRows, blocks_text

__all__ = ["TAGS", "TOGETHER", "Move", "gathered", "own", "said", "tag_of", "whole"]

T = TypeVar("T")
RANKS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)  #: numbers of shards that a vocabulary is cut into
ATTENTION = {"q", "k", "v", "qkv", "o"}
#: Tag → what is said of rows that went there.
TAGS: Mapping[str, str] = {
    "layer": "hold another layer's values", "expert": "hold another expert's values",
    "gate_up": "hold up where gate was, and the reverse", "gate_up_mixed": "mix rows of gate and up",
    "qkv": "mix rows of query, key and value", "heads": "have their heads in another order",
    "rope": "have the rows within each head in another order", "vocab": "have rows of the vocabulary elsewhere",
    "padding": "have padding rows among trained ones of the vocabulary",
    "uneven": "have the rows of the last, smaller shard elsewhere",
    "ranks": "have blocks of rows or columns in another order",
    "axis": "are shards that were joined along the wrong axis",
    "rows": "have rows in another order", "name": "hold another tensor's values",
    "mixed": "mix rows of several tensors",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Move:
    """Where the rows or columns of a weight were before.

    Attributes:
        sources: names of the tensors that ``blocks`` point to; empty: its own.
        form: numbers of the order, as :mod:`workbench.analysis.patterns` gives them; text: the same in words.
        adapter: whether it is an adapter's: those are never fused.
    """

    fqn: str
    shape: tuple[int, ...]
    columns: bool = False
    sources: tuple[str, ...] = ()
    blocks: tuple[MovedRows, ...] = ()
    form: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""
    adapter: bool = False


#: Tag → others that are part of the same move, where it is seen at all.
TOGETHER: Mapping[str, tuple[str, ...]] = {
    "gate_up_mixed": ("gate_up",), "ranks": ("heads", "vocab", "padding", "rope"), "layer": ("name",),
}  # fmt: skip


def gathered(tags: dict[str, list[T]]) -> dict[str, list[T]]:
    """What has one cause, under one tag."""
    for lead, others in TOGETHER.items():
        if lead in tags:
            for tag in others:
                tags[lead] += tags.pop(tag, [])
    return tags


def tag_of(facts: Geometry, one: Move) -> str:
    kind = kind_of(one.fqn)
    if one.form.get("form") == "axis":
        return "axis"
    if kind == "qkv" and own(one) and _thirds(one):
        return "qkv"
    if one.columns:
        if kind == "qkv":  # GPT-2 stores [in, out]
            return "heads"
        return "heads" if kind == "o" and _heads(facts, one) else "ranks"
    if own(one):
        return _own_tag(facts, one, kind)
    kinds = {kind_of(name) for name in one.sources} | {kind}
    mine = names_of(one.fqn)
    theirs = [names_of(name) for name in one.sources]
    same_layer = all(other[1] == mine[1] and other[2] == mine[2] for other in theirs)
    if same_layer and whole(one) and mine[0] != theirs[0][0] and kinds == {kind} and kind:
        return "layer"  # of another stack: an encoder's in the decoder
    if one.adapter and same_layer and whole(one):
        return "name"
    if same_layer and kinds <= {"gate", "up"}:
        return "gate_up" if whole(one) else "gate_up_mixed"
    if same_layer and kinds <= {"q", "k", "v"}:
        return "qkv"
    if all(other[0] == mine[0] for other in theirs):
        if all(other[1] == mine[1] for other in theirs):
            return "expert"
        return "layer"
    return "name" if whole(one) else "mixed"


def _own_tag(facts: Geometry, one: Move, kind: str) -> str:
    if kind in ("embed", "head"):
        return _vocabulary(facts, one)
    if kind in ATTENTION and kind != "o":
        return "heads" if _heads(facts, one) else "rope"
    if kind == "router":
        return "expert"
    if len(one.shape) == 3 and _by(one, one.shape[1]):
        return "expert"
    return "rows" if one.form.get("form") == "roll" and not _even(one) else "ranks"


def _thirds(one: Move) -> bool:
    """Whether query, key and value of a fused weight were exchanged whole."""
    width = one.shape[-1] if one.columns else one.shape[0]
    sizes = [one.form[name] for name in ("first", "second", "size") if name in one.form]
    return bool(sizes) and width % 3 == 0 and all(int(size) % (width // 3) == 0 for size in sizes)


def _even(one: Move) -> bool:
    """Whether a roll is by whole shards."""
    return any(int(one.form.get("shift", 1)) * n % one.shape[0] == 0 for n in RANKS)


def _vocabulary(facts: Geometry, one: Move) -> str:
    """Shifted, or padded rank by rank: whole ends of a rank's part come from the padding at the end."""
    if one.form.get("form") in ("halves", "blocks"):
        return "ranks"
    vocab, rows = facts.vocab, one.shape[0]
    blocks = one.blocks
    cuts = {-(-rows // n) * (n - 1) for n in RANKS if rows % n}
    if len(blocks) > 1 and blocks[0].start == blocks[0].first == 0 and blocks[1].start in cuts:
        return "uneven"
    if not vocab or len(blocks) < 3 or blocks[0].start != blocks[0].first:
        return "vocab"
    for block in blocks[1:]:
        late = block.first >= vocab
        parts = {round(rows / n * k) for n in (2, 4, 8, 16) for k in range(1, n)} if rows > 16 else set()
        if late and block.start < (vocab or rows) and any(abs(block.stop - part) <= 1 for part in parts):
            return "padding"
    return "vocab"


def _heads(facts: Geometry, one: Move) -> bool:
    """Whether only whole heads moved (of their own size, where it is known)."""
    size = facts.head_dim
    if one.columns:
        unit = one.form.get("size") or one.form.get("unit") or 1
        return size is not None and int(unit) % size == 0
    return _by(one, size) if size else one.form.get("unit") != 1


def _by(one: Move, unit: int) -> bool:
    """Whether rows moved by whole multiples of that many (edges may be known to some rows only)."""
    return bool(one.blocks) and all((block.first - block.start) % unit == 0 for block in one.blocks)


# ---- words -----------------------------------------------------------------------------------------------------------


def whole(one: Move) -> bool:
    """One other tensor, row by row."""
    return len(one.sources) == 1 and one.sources[0] != one.fqn and all(b.start == b.first for b in one.blocks)


def own(one: Move) -> bool:
    return not one.sources or one.sources == (one.fqn,)


def said(one: Move) -> str:
    if whole(one):
        return f"{one.fqn!r} holds {one.sources[0]!r}"
    said = one.text or blocks_text(one.blocks, [repr(name) for name in one.sources])
    return f"in {one.fqn!r} {said}"
