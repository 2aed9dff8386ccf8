"""Which layout was misread, told by where rows or columns went and by what the tensors are called.

::

    rows of one other tensor       layer (E9) · expert (E10) · gate ↔ up (E3) · q, k, v (E4)
    rows of several                gate and up (E2) · q, k and v (E4)
    own rows or columns            vocabulary (F7 E11) · rotary halves (E5) · heads (E6) · ranks (E1)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from workbench.conventions import Geometry
from workbench.doctor.echo.atoms import kind_of, names_of
from workbench.doctor.rows.index import Block, blocks_text

__all__ = ["TAGS", "Move", "gathered", "own", "said", "tag_of", "whole"]

T = TypeVar("T")
ATTENTION = {"q", "k", "v", "qkv", "o"}
#: Where a tag leads: its causes, likeliest first, and its words.
TAGS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "layer": (("E9",), "hold another layer's values"),
    "expert": (("E10",), "hold another expert's values"),
    "gate_up": (("E3", "E2"), "gate and up are exchanged"),
    "gate_up_mixed": (("E2",), "rows of gate and up are mixed"),
    "qkv": (("E4", "E1"), "rows of query, key and value are mixed"),
    "heads": (("E6", "E1"), "heads stand in another order"),
    "rope": (("E5", "E6"), "rows within a head stand in another order"),
    "vocab": (("F7", "E1"), "rows of the vocabulary moved"),
    "padding": (("E11", "F7"), "padding rows stand among trained ones of the vocabulary"),
    "ranks": (("E1",), "shards are joined in another order"),
    "name": (("E9", "A1"), "hold another tensor's values"),
    "mixed": (("E1", "E13"), "rows of several tensors are mixed"),
}


@dataclass(frozen=True, eq=False)
class Move:
    """Where the rows or columns of a weight were before.

    Attributes:
        sources: names of the tensors that ``blocks`` point to; empty: its own.
        form: numbers of the order, as :mod:`workbench.analysis.patterns` gives them; text: the same in words.
    """

    fqn: str
    shape: tuple[int, ...]
    columns: bool = False
    sources: tuple[str, ...] = ()
    blocks: tuple[Block, ...] = ()
    form: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""


def gathered(tags: dict[str, list[T]]) -> dict[str, list[T]]:
    """What has one cause, under one tag."""
    if "gate_up_mixed" in tags:
        tags["gate_up_mixed"] += tags.pop("gate_up", [])
    if "ranks" in tags:  # heads and tokens moved with the ranks that held them
        for tag in ("heads", "vocab", "padding", "rope"):
            tags["ranks"] += tags.pop(tag, [])
    if "layer" in tags:
        tags["layer"] += tags.pop("name", [])
    return tags


def tag_of(facts: Geometry, one: Move) -> str:
    kind = kind_of(one.fqn)
    if one.columns:
        return "heads" if kind == "o" and _heads(facts, one) else "ranks"
    if own(one):
        return _own_tag(facts, one, kind)
    kinds = {kind_of(name) for name in one.sources} | {kind}
    mine = names_of(one.fqn)
    theirs = [names_of(name) for name in one.sources]
    same_layer = all(other[1] == mine[1] and other[2] == mine[2] for other in theirs)
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
    if len(one.shape) == 3 and _by(one, one.shape[1]):
        return "expert"
    return "ranks"


def _vocabulary(facts: Geometry, one: Move) -> str:
    """Shifted, or padded rank by rank: whole ends of a rank's part come from the padding at the end."""
    if one.form.get("form") in ("halves", "blocks"):
        return "ranks"
    vocab, rows = facts.vocab, one.shape[0]
    blocks = one.blocks
    if len(blocks) < 3 or blocks[0].start != blocks[0].first:
        return "vocab"
    for block in blocks[1:]:
        late = block.first >= vocab if vocab else block.first > block.start and block.start < rows // 2 + 1
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
