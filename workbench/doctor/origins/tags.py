"""Infer which layout was misread from the moves of rows or columns and from the tensors' names.

::

    rows of one other tensor       layer (E9) · expert (E10) · gate ↔ up (E3) · q, k, v (E4)
    rows of several                gate and up (E2) · q, k and v (E4)
    own rows or columns            vocabulary (F7 E11) · q, k, v (E4) · rotary halves (E5) · heads (E6) · ranks (E1)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from workbench.core.words import plural
from workbench.doctor.origins.index import MovedRows, blocks_text
from workbench.names.frameworks import Geometry
from workbench.names.weights import parse

T = TypeVar("T")
RANKS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)  #: numbers of shards of a vocabulary
ATTENTION = {"q", "k", "v", "qkv", "o"}
#: A part of the names of a network that follows another one: a target, a teacher, an average, a momentum encoder.
FOLLOWER = re.compile(r"(?:\w*_)?(?:target|teacher|ema|swa|averaged?|shadow|momentum)(?:_\w*)?")
#: The same of one that was copied from another one, and is not trained.
REFERENCE = re.compile(r"(?:\w*_)?(?:reference|ref)(?:_\w*)?")
WITHIN = {"interleave", "regroup"}  #: forms of rows that change between the two layouts of rotary embeddings
#: Tag → words about such a move.
TAGS: Mapping[str, str] = {
    "layer": "hold another layer's values",
    "stack": "hold another stack's values",  # an encoder's in the decoder
    "followed": "hold the values of the network that they follow",  # a student's in its teacher
    "reference": "hold the values of the network that was trained",  # a policy's in its reference
    "led": "hold the values of the network that follows them",  # a teacher's in its student
    "trained": "hold the values of the copy that is not trained",  # a reference's in its policy
    "expert": "hold another expert's values",
    "gate_up": "have gate and up swapped",
    "gate_up_mixed": "mix rows of gate and up",
    "qkv": "mix rows of query, key and value",
    "heads": "have their heads in another order",
    "rope": "have the rows within each head in another order",
    "vocab": "have rows of the vocabulary at other places",
    "padding": "have padding rows among trained ones of the vocabulary",
    "uneven": "have the rows of the last, smaller shard at other places",
    "ranks": "have blocks of rows or columns in another order",
    "axis": "consist of shards that were joined along the wrong axis",
    "transposed": "are transposed",
    "order": "have their elements in another order",
    "shift": "are shifted by some elements",
    "tied": "hold the other one's values",
    "rows": "have rows in another order",
    "name": "hold another tensor's values",
    "mixed": "mix rows of several tensors",
}


_SINGULAR = {"hold": "holds", "have": "has", "mix": "mixes", "are": "is", "consist": "consists"}


@dataclass(frozen=True, eq=False)
class Move:
    """The old places of the rows or columns of a weight.

    Attributes:
        sources: names of the tensors that ``blocks`` point to; empty for its own.
        form: numbers of the order, as in :mod:`workbench.analysis.patterns`. text: the same in words.
        adapter: whether it belongs to an adapter, which is never fused.
    """

    fqn: str
    shape: tuple[int, ...]
    columns: bool = False
    sources: tuple[str, ...] = ()
    blocks: tuple[MovedRows, ...] = ()
    form: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""
    adapter: bool = False


#: Tag → other tags that are part of the same move, if it occurs.
TOGETHER: Mapping[str, tuple[str, ...]] = {
    "gate_up_mixed": ("gate_up",),
    "ranks": ("heads", "vocab", "padding", "rope"),
    "followed": ("layer", "stack", "name"),
    "reference": ("layer", "stack", "name"),
    "trained": ("layer", "stack", "name"),
    "led": ("layer", "stack", "name"),
    "layer": ("name", "stack"),
    "stack": ("name",),
    "flat": ("mixed",),
}


def gathered(tags: dict[str, list[T]]) -> dict[str, list[T]]:
    """Merge tags with the same cause under one tag."""
    for lead, others in TOGETHER.items():
        if lead in tags:
            for tag in others:
                tags[lead] += tags.pop(tag, [])
    return tags


def tag_of(facts: Geometry, one: Move) -> str:
    mine, theirs = parse(one.fqn), [parse(name) for name in one.sources]
    kind = mine.kind
    others = set(one.sources) - {one.fqn}  # rows that are equal in both networks are found at their own place
    in_place = not one.columns and all(block.start == block.first for block in one.blocks)
    if in_place and len(others) == 1:
        for tag, pattern, names in (
            ("followed", FOLLOWER, (one.fqn, *others)),
            ("reference", REFERENCE, (one.fqn, *others)),
            ("trained", REFERENCE, (*others, one.fqn)),
            ("led", FOLLOWER, (*others, one.fqn)),
        ):
            if _follows(pattern, *names):
                return tag
    if one.form.get("form") == "axis":
        return "axis"
    if one.form.get("form") in ("shift", "order"):
        return str(one.form["form"])
    if "axes" in one.form or one.form.get("form") == "transposed":
        return "transposed"
    if kind == "qkv" and own(one) and (_thirds(one) or _by_head(one)):
        return "qkv"
    halves = 2 * int(one.form.get("size", 0)) in one.shape[-1 if one.columns else -2 :][:1]
    if kind == "gate_up" and own(one) and halves:  # by columns: experts of transformers store [in, out]
        return "gate_up"
    if one.columns:
        if kind == "qkv":  # GPT-2 stores [in, out]
            return "heads"
        return "heads" if kind == "o" and _heads(facts, one) else "ranks"
    if own(one):
        return _own_tag(facts, one, kind)
    kinds = {other.kind for other in theirs} | {kind}
    same_layer = all((other.layer, other.expert) == (mine.layer, mine.expert) for other in theirs)
    if kinds == {"embed", "head"} and whole(one):
        return "tied"
    if same_layer and whole(one) and mine.pattern != theirs[0].pattern and kinds == {kind} and kind != "other":
        return "stack"
    if one.adapter and same_layer and whole(one):
        return "name"
    if same_layer and kinds <= {"gate", "up"}:
        return "gate_up" if whole(one) else "gate_up_mixed"
    if same_layer and kinds <= {"q", "k", "v"}:
        return "qkv"
    if all(other.pattern == mine.pattern for other in theirs):
        if all(other.layer == mine.layer for other in theirs):
            return "expert" if whole(one) or len(theirs) == 1 else "mixed"
        return "layer"
    return "name" if whole(one) else "mixed"


def is_follower(name: str) -> bool:
    """Return whether a weight is one of a network that follows another one."""
    return is_reference(name) or any(map(FOLLOWER.fullmatch, name.split(".")))


def is_reference(name: str) -> bool:
    """Return whether a weight is one of a network that was copied from another one, and is not trained."""
    return any(map(REFERENCE.fullmatch, name.split(".")))


def has_copy(name: str, names: Iterable[str]) -> bool:
    """Return whether a copy of the weight's network, or one that follows it, is stored too."""
    return any(_follows(pattern, other, name) for other in names for pattern in (REFERENCE, FOLLOWER))


def followers(names: Iterable[str]) -> set[str]:
    """Return those of ``names`` whose network follows another one, with the tensor that they follow in ``names``."""
    found: dict[tuple[object, ...], set[str]] = {}
    led: set[tuple[object, ...]] = set()
    for name in names:
        parts = name.split(".")
        for at, part in enumerate(parts):
            rest = (at, *parts[:at], *parts[at + 1 :])
            if FOLLOWER.fullmatch(part):
                found.setdefault(rest, set()).add(name)
            else:
                led.add(rest)
    return {name for rest, some in found.items() if rest in led for name in some}


def _follows(pattern: re.Pattern[str], name: str, source: str) -> bool:
    """Return whether ``source`` is the namesake of a weight of a network that its own follows."""
    mine, theirs = name.split("."), source.split(".")
    parts = [(a, b) for a, b in zip(mine, theirs, strict=False) if a != b]
    return len(mine) == len(theirs) and len(parts) == 1 and bool(pattern.fullmatch(parts[0][0]))


def _own_tag(facts: Geometry, one: Move, kind: str) -> str:
    if kind in ("embed", "head"):
        return _vocabulary(facts, one)
    if kind in ATTENTION and kind != "o":
        return "heads" if _heads(facts, one) else "rope" if one.form.get("form") in WITHIN else "ranks"
    if kind == "router":
        return "expert"
    if len(one.shape) == 3 and _by(one, one.shape[1]):
        return "expert"
    return "rows" if one.form.get("form") == "roll" and not _even(one) else "ranks"


def _thirds(one: Move) -> bool:
    """Return whether query, key and value of a fused weight were swapped entirely."""
    width = one.shape[-1] if one.columns else one.shape[0]
    sizes = [one.form[name] for name in ("first", "second", "size") if name in one.form]
    return bool(sizes) and width % 3 == 0 and all(int(size) % (width // 3) == 0 for size in sizes)


def _by_head(one: Move) -> bool:
    """Return whether query, key and value are grouped by head on one side, and contiguous on the other."""
    form = one.form
    if form.get("form") == "regroup":
        return len(form["parts"]) == 3
    return form.get("form") == "interleave" and form["outer"] == 1 and 3 in (form["groups"], form["each"])


def _even(one: Move) -> bool:
    """Return whether a roll moves complete shards."""
    return any(int(one.form.get("shift", 1)) * n % one.shape[0] == 0 for n in RANKS)


def _vocabulary(facts: Geometry, one: Move) -> str:
    """Return the tag of moved vocabulary rows: shifted, uneven, or padded rank by rank."""
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
    """Return whether only complete heads moved (of their own size, if known)."""
    size = facts.head_dim
    if one.columns:
        unit = one.form.get("size") or one.form.get("unit") or 1
        return size is not None and int(unit) % size == 0
    return _by(one, size) if size else one.form.get("unit") != 1


def _by(one: Move, unit: int) -> bool:
    """Return whether rows moved by multiples of ``unit``."""
    return bool(one.blocks) and all((block.first - block.start) % unit == 0 for block in one.blocks)


# ---- words -----------------------------------------------------------------------------------------------------------


def whole(one: Move) -> bool:
    """Return whether the move is one other tensor, row by row."""
    return len(one.sources) == 1 and one.sources[0] != one.fqn and all(b.start == b.first for b in one.blocks)


def own(one: Move) -> bool:
    return not one.sources or one.sources == (one.fqn,)


def singular(words: str) -> str:
    """Return the words of a tag about one tensor: ``holds another layer's values``."""
    verb, _, rest = words.partition(" ")
    return f"{_SINGULAR[verb]} {rest}"


def shared_sources(moves: Iterable[Move]) -> str:
    """Return ``; 18 tensors hold the values of 6``, or "" if each of them holds another one's."""
    held = {one.fqn: one.sources[0] for one in moves if whole(one)}
    count = len(set(held.values()))
    return "" if count == len(held) else f"; {plural(len(held), 'tensor', 'hold')} the values of {count:,}"


def move_text(one: Move) -> str:
    """Return where the rows of a weight come from."""
    if whole(one):
        return f"{one.fqn!r} holds {one.sources[0]!r}"
    words = one.text or blocks_text(one.blocks, [repr(name) for name in one.sources])
    if words.startswith("transposed: "):  # which the tag says already
        before, _, after = words.removeprefix("transposed: ").partition(" became ")
        return f"in {one.fqn!r}, {before} became {after}" if after and before != after else repr(one.fqn)
    return f"in {one.fqn!r} {words}"
