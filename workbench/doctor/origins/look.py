"""Classify the change of each weight and state in the load: equal, or one of a few forms.

::

    counts and norms   nan · zero (all of it)              from the comparison, no further read
    rows               moved                               workbench.doctor.origins.index
    patterns           flip · zeros · rounded · ratio · fill · columns · part
    line               flat (cut elsewhere)                workbench.doctor.origins.flat
    else               near (cosine ≥ .9) · other

Every form is proved on all elements, except ``flat`` (windows), shards joined along the other axis (rows), a grid of
integers (see :func:`workbench.doctor.origins.became.on_grid`) and ``near`` (a cosine).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import log2
from typing import Any

import numpy as np

from workbench.analysis.diff_rows import TensorDiff
from workbench.analysis.patterns import Pattern, recognise
from workbench.analysis.patterns.flips import number_text, one_flip
from workbench.analysis.patterns.forms import find_form
from workbench.analysis.patterns.local import ENOUGH
from workbench.analysis.patterns.long import LONGEST
from workbench.analysis.patterns.read import bits, readable, runs_of
from workbench.analysis.patterns.rounding import FLOATS, encode, numbers, rounded
from workbench.core.words import plural
from workbench.doctor.ledger.roles import BUFFERS, MASTERS, MOMENTS, STATE, WEIGHTS, quantity
from workbench.doctor.origins.atoms import Atom, Atoms
from workbench.doctor.origins.became import on_grid, one_factor, power, smallest
from workbench.doctor.origins.flat import FoundWindow, find_windows
from workbench.doctor.origins.index import MovedRows, RowIndex, row_keys, row_shape
from workbench.doctor.origins.tags import WITHIN, Move, has_copy, is_follower
from workbench.errors import WorkbenchError
from workbench.names.roles import adapter_of
from workbench.tensor import LazyTensor

NEAR = 0.9  #: cosine from which a tensor is the same one, changed
SCALED = 0.98  #: cosine from which a common factor is searched
PLAIN = 0.95  #: cosine from which a matrix's rows were certainly not permuted
FOUND = 0.9  #: share of the changed rows that were elsewhere before
LEAST = 16  #: fewest bytes that identify a row
PATTERNS = 256  #: most tensors searched for a pattern
PATTERN_BYTES = 4 << 30
WINDOWS_FOUND = 0.6  #: share of a tensor's windows; windows across a cut are not found
FEW = 8  #: elements that are equal by chance
OCTAVES = 16  #: factor of 2 by which no update changes one element alone
SMALL = 1 << 20  #: elements below which a tensor may be too small to prove a form by itself
SAMPLED = 48  #: rows that are searched first, before all of them
SHARDS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 64)  #: numbers of shards of a matrix
LARGE = 8 << 20  #: bytes of a tensor from which sampling is worthwhile
_NAMED = {
    "bit_flip": "flip",
    "bit_flips": "flip",
    "zero_run": "zeros",
    "rounded": "rounded",
    "cast": "rounded",
    "ratio": "ratio",
    "fill": "fill",
    "replaced": "part",
}
WITHIN_PART = ("ratio", "rounded")  #: forms that are searched in the part that changed, if the rest is equal


@dataclass(frozen=True, eq=False)
class AtomLook:
    """The change of one atom between both sides.

    Attributes:
        kind: ``near other part moved columns flat zero zeros pruned fill nan flip rounded ratio power swapped
            weights unread``.
        share: share of the elements that changed. cosine: between before and after.
        sources: names of the tensors that ``blocks`` point to.
        blocks: the old places of rows, if ``moved``. pattern: the recognised pattern, if any.
        windows: if ``flat``: ``(flat position, name of the tensor, flat position there)``.
    """

    atom: Atom
    kind: str
    row: TensorDiff
    share: float
    cosine: float | None
    text: str = ""
    sources: tuple[str, ...] = ()
    blocks: tuple[MovedRows, ...] = ()
    pattern: Pattern | None = None
    windows: tuple[tuple[int, str, int], ...] = ()
    form: Mapping[str, Any] = field(default_factory=dict)

    @property
    def move(self) -> Move:
        """The old places of its rows or columns."""
        columns = self.kind == "columns"
        adapter = bool(adapter_of(self.atom.fqn))
        return Move(self.atom.fqn, self.row.shape_b, columns, self.sources, self.blocks, self.form, self.text, adapter)


def look(atoms: Atoms, changed: Sequence[tuple[Atom, TensorDiff]], not_checked: dict[str, str]) -> list[AtomLook]:
    """Classify the changes of tensors that differ.

    Args:
        changed: atoms with their comparison.
        not_checked: receives what was left out.
    """
    found = [_plainly(atom, row) for atom, row in changed]
    found = _moved(atoms, found, not_checked)
    found = _patterns(atoms, found, not_checked)
    return _flat(atoms, _exchanged(atoms, found), not_checked)


def _exchanged(atoms: Atoms, looks: list[AtomLook]) -> list[AtomLook]:
    """Recognise states of one parameter that hold each other's values."""
    held: dict[str, dict[str, int]] = {}
    for at, one in enumerate(looks):
        if quantity(one.atom.role) in (*MOMENTS, STATE):
            held.setdefault(one.atom.fqn, {})[one.atom.role] = at
    before = {(atom.fqn, atom.role): atom for atom in atoms.rows}
    for fqn, roles in held.items():
        for role, at in roles.items():
            if looks[at].kind not in ("other", "near", "zero", "nan"):
                continue
            mine = atoms.tensors(looks[at].atom)[1]
            for other in roles.keys() - {role}:
                theirs = atoms.before(before[fqn, other])
                if _alike(mine, theirs):
                    looks[at] = replace(looks[at], kind="swapped", text=f"{role} of {fqn!r} holds its {other}")
    weights = [atoms.before(atom) for atom in atoms.rows if atom.role in (*WEIGHTS, *MASTERS)]
    for at, one in enumerate(looks):
        if one.kind in ("other", "near") and quantity(one.atom.role) == STATE and one.row.numel > FEW:
            mine = atoms.tensors(one.atom)[1]
            if any(_alike(w, mine) for w in weights):
                looks[at] = replace(one, kind="weights")
    return looks


def _alike(one: LazyTensor, two: LazyTensor) -> bool:
    """Return whether two tensors have the same bits; a row may be a column."""
    if one.element != two.element:
        return False
    if one.shape != two.shape:
        vectors = one.numel() == two.numel() == max(one.shape, default=0) == max(two.shape, default=0)
        sides = [bits(side, (slice(None),) * side.ndim).reshape(-1) for side in (one, two)] if vectors else []
        return vectors and bool((sides[0] == sides[1]).all())
    runs = runs_of(one.shape, one.element.itemsize).ends_first()
    return all((bits(one, run.key) == bits(two, run.key)).all() for run in runs)


def _plainly(atom: Atom, row: TensorDiff) -> AtomLook:
    c = row.comparison
    if c is None or row.status == "unread":
        return AtomLook(atom, "unread", row, 0.0, None, row.why)
    share, cosine = row.share or 0.0, c.cosine
    kind = "near" if cosine is not None and cosine >= NEAR and row.numel > 1 else "other"  # one number has no direction
    if c.nan_new or c.inf_b > c.inf_a:
        count = c.nan_new + max(c.inf_b - c.inf_a, 0)
        text = f"{count:,} of {row.numel:,} elements {'is' if count == 1 else 'are'} no longer finite"
        return AtomLook(atom, "nan", row, share, cosine, text, form={"alone": c.changed == count <= FEW})
    if c.how != "raw" and c.looked == c.seen and c.l2_b == 0 and c.l2_a:
        return AtomLook(atom, "zero", row, share, cosine, f"all {plural(row.numel, 'element')} became zero")
    return AtomLook(atom, kind, row, share, cosine)


# ---- rows ------------------------------------------------------------------------------------------------------------


def _moved(atoms: Atoms, looks: list[AtomLook], not_checked: dict[str, str]) -> list[AtomLook]:
    """Search rows in all tensors of before of the same role and row length."""
    wanted: dict[tuple[str, str, int, bool], list[int]] = {}
    names = {atom.fqn for atom in atoms.rows if is_follower(atom.fqn)}
    for at, one in enumerate(looks):
        before, after = atoms.tensors(one.atom)
        vector = len(before.shape) < 2
        alike = one.kind == "near" and not vector and (one.cosine or 0) >= PLAIN
        # which is like itself and like the one that it follows
        sure = alike and not is_follower(one.atom.fqn) and not has_copy(one.atom.fqn, names)
        if one.kind in ("near", "other") and not sure and readable(before) and before.element == after.element:
            width = row_shape(before.shape)[1]
            if width * before.element.itemsize >= LEAST:
                wanted.setdefault((one.atom.role, before.element.name, width, vector), []).append(at)
    for (role, element, width, vector), group in wanted.items():
        siblings = [
            atom
            for atom in (*atoms.rows, *atoms.gone)
            if atom.role == role and _fits(atoms.before(atom), element, width, vector)
        ]
        try:
            index = RowIndex(atoms.before(atom) for atom in siblings)
            numbers = {atom.tensor: number for number, atom in enumerate(siblings)}
            for at in group:
                looks[at] = _traced(atoms, looks[at], index, numbers[looks[at].atom.tensor], siblings)
        except WorkbenchError as error:
            not_checked[f"rows of {role!r}, {plural(width, 'element')} each"] = str(error)
    return looks


def _fits(tensor: LazyTensor, element: str, width: int, vector: bool) -> bool:
    return (
        tensor.element.name == element
        and (len(tensor.shape) < 2) == vector
        and tensor.numel() > 0
        and row_shape(tensor.shape)[1] == width
    )


def _traced(atoms: Atoms, one: AtomLook, index: RowIndex, number: int, siblings: Sequence[Atom]) -> AtomLook:
    after = atoms.tensors(one.atom)[1]
    if after.nbytes >= LARGE and len(after.shape) > 1:
        picked = np.unique(np.linspace(0, after.shape[0] - 1, SAMPLED).astype(np.int64))
        keys, plain = row_keys(after.lazy[picked.tolist()])
        if not index.holds(keys[~plain]).any():
            return one
    keys, plain = row_keys(after)
    origins = index.origins(number, keys, plain)
    if origins.share < FOUND or not any(
        block.source != number or block.start != block.first for block in origins.blocks
    ):
        return one
    if origins.looked == 1 and len(keys) > 1:
        return one  # a single row that became another is not an order
    used = sorted({block.source for block in origins.blocks})
    names = {source: place for place, source in enumerate(used)}
    blocks = tuple(replace(block, source=names[block.source]) for block in origins.blocks)
    names_used = tuple(siblings[k].fqn for k in used)
    form = find_form(index.keys(number), keys) if used == [number] and len(keys) < LONGEST else None
    if form is None:
        return replace(one, kind="moved", sources=names_used, blocks=blocks, form={"rows": len(keys)})
    words = form.say("row", "rows")
    detail = {"rows": len(keys), "form": form.name, **form.detail}
    return replace(one, kind="moved", text=words, sources=names_used, blocks=blocks, form=detail)


# ---- a line cut at other places -------------------------------------------------------------------------------------


def _flat(atoms: Atoms, looks: list[AtomLook], not_checked: dict[str, str]) -> list[AtomLook]:
    """Check whether tensors that differ without a form, or seem shifted, are another part of the flat line."""
    groups: dict[tuple[str, str], list[int]] = {}
    for at, one in enumerate(looks):
        before, after = atoms.tensors(one.atom)
        shifted = one.pattern is not None and one.pattern.name == "shift"
        loose = one.kind in ("other", "near") and (one.cosine or 0) < PLAIN and one.atom.role not in BUFFERS
        if (loose or shifted) and before.element == after.element and readable(after):
            groups.setdefault((one.atom.role, before.element.name), []).append(at)
    for (role, element), group in groups.items():
        line = [atom for atom in atoms.rows if atom.role == role and atoms.before(atom).element.name == element]
        names = [atom.fqn for atom in line]
        own = {atom.tensor: number for number, atom in enumerate(line)}
        found: dict[int, list[FoundWindow]] = {}
        try:
            windows = find_windows([atoms.tensors(looks[at].atom)[1] for at in group], [atoms.before(a) for a in line])
        except WorkbenchError as error:
            not_checked[f"line of {role!r}"] = str(error)
            continue
        for window in windows:
            found.setdefault(window.number, []).append(window)
        for number, seen in found.items():
            at = group[number]
            here = own[looks[at].atom.tensor]
            there = [w for w in seen if w.source >= 0]
            still = all(w.source == here and w.at == w.first for w in there)
            if len(there) < max(WINDOWS_FOUND * len(seen), 2) or still:
                continue
            if all(w.source == here for w in there) and (shards := rejoined(*atoms.tensors(looks[at].atom))):
                text = f"{shards} shards were joined along the other axis"
                looks[at] = replace(looks[at], kind="columns", text=text, form={"form": "axis", "shards": shards})
                continue
            looks[at] = replace(looks[at], kind="flat", windows=tuple((w.at, names[w.source], w.first) for w in there))
    return looks


# ---- patterns --------------------------------------------------------------------------------------------------------


def _patterns(atoms: Atoms, looks: list[AtomLook], not_checked: dict[str, str]) -> list[AtomLook]:
    wanted = [at for at, one in enumerate(looks) if one.kind in ("near", "other")]
    order = sorted(wanted, key=lambda at: looks[at].row.numel)
    spent = left = 0
    for place, at in enumerate(order):
        one = looks[at]
        spent += one.row.nbytes
        if place >= PATTERNS or spent > PATTERN_BYTES:
            left += 1
            continue
        before, after = atoms.tensors(one.atom)
        try:
            pattern = recognise(before, after)
        except WorkbenchError as error:
            not_checked[f"pattern of {one.atom.fqn!r}"] = str(error)
            continue
        if pattern is not None:
            looks[at] = _named(one, pattern)
            if looks[at].kind == "part":
                looks[at] = _inside(looks[at], pattern, before, after)
            if pattern.name == "cast" and not pattern.detail["changed"]:
                looks[at] = replace(looks[at], kind="type")  # the same numbers in a wider type
        if looks[at].kind in ("near", "other", "part"):
            if _zeros(one, before, after):
                pruned = one.atom.role in WEIGHTS and smallest(before, after)
                looks[at] = replace(looks[at], kind="pruned" if pruned else "zeros", text="")
            elif looks[at].kind != "part" and _reordered(before, after) and not rejoined(before, after):
                text = "the same values are at other places"
                looks[at] = replace(looks[at], kind="columns", text=text, form={"form": "order"})
            elif one.row.numel <= SMALL:
                looks[at] = _constant(looks[at], after)
            if looks[at].kind == "near" and (grid := on_grid(before, after)):
                looks[at] = replace(looks[at], kind="rounded", text="", form={"through": grid})
            elif looks[at].kind == "near" and (one.cosine or 0) > SCALED and (ratio := one_factor(before, after)):
                text = f"all elements are {ratio:.6g} times the old values, up to rounding"
                looks[at] = replace(looks[at], kind="ratio", text=text, form={"ratio": ratio, "rounded": True})
            if looks[at].kind in ("near", "other"):
                looks[at] = _raised(looks[at], before, after)
        looks[at] = _jumped(looks[at], before, after)
    _joined(atoms, looks)
    if left:
        not_checked["patterns"] = f"{left:,} of {len(wanted):,} changed tensors were not searched for a pattern"
    return [one for one in looks if one.kind != "type"]


def _jumped(one: AtomLook, before: LazyTensor, after: LazyTensor) -> AtomLook:
    """Recognise one element that became, or was, larger by many orders of magnitude, while all others are equal."""
    c = one.row.comparison
    if one.kind not in ("near", "other", "part") or c is None or c.how != "bits" or c.max_at is None:
        return one
    if c.changed != 1 or one.row.numel < ENOUGH or not (c.max_a and c.max_b) or before.element.kind != "f":
        return one
    if abs(log2(abs(c.max_b / c.max_a))) < OCTAVES:
        return one
    key = tuple(slice(k, k + 1) for k in c.max_at)
    old, new = (bits(side, key).reshape(-1)[0] for side in (before, after))
    at = int(np.ravel_multi_index(c.max_at, before.shape))
    flip = one_flip(before.element, tuple(before.shape), at, int(old), int(new))
    place = ", ".join(f"{k:,}" for k in flip["index"])
    text = f"element ({place}) was {flip['before']} and is {flip['after']}; the other {one.row.numel - 1:,} are equal"
    return replace(one, kind="flip", text=text, form={"flips": [flip]})


def _inside(one: AtomLook, pattern: Pattern, before: LazyTensor, after: LazyTensor) -> AtomLook:
    """Return the form of the block that changed, as one rank's part may be scaled or rounded alone."""
    if "offsets" not in pattern.detail:
        return one
    starts, sizes = pattern.detail["offsets"], pattern.detail["sizes"]
    box = tuple(slice(at, at + size) for at, size in zip(starts, sizes, strict=True))
    old, new = before.lazy[box], after.lazy[box]
    inner = recognise(old, new)
    if inner is not None and _NAMED.get(inner.name) in WITHIN_PART:
        return _named(one, inner)
    if inner is None and (grid := on_grid(old, new)):
        return replace(one, kind="rounded", text="", form={"through": grid})
    return _raised(one, old, new)


def _raised(one: AtomLook, before: LazyTensor, after: LazyTensor) -> AtomLook:
    """Recognise values raised to a power, as squares taken for roots."""
    if one.atom.role in BUFFERS or (found := power(before, after)) is None:
        return one
    return replace(
        one, kind="power", text=f"magnitudes are the old ones to the power {found:.3g}", form={"power": found}
    )


def _reordered(before: LazyTensor, after: LazyTensor) -> bool:
    """Return whether a tensor holds its old values in another order, most of them different from each other."""
    if before.element != after.element or before.shape != after.shape or not 1 < after.numel() <= SMALL:
        return False
    old, new = (np.sort(bits(one).reshape(-1)) for one in (before, after))
    return bool(np.array_equal(old, new) and 2 * np.count_nonzero(old[1:] != old[:-1]) > len(old))


def _named(one: AtomLook, pattern: Pattern) -> AtomLook:
    detail = dict(pattern.detail)
    if pattern.name in WITHIN:  # as rows in another order are described
        detail["form"] = pattern.name
    kind = _NAMED.get(pattern.name, "columns" if detail.get("axis") else "moved")
    if pattern.name == "fill":
        kind = "zeros" if detail["value"] in ("0", "0.0") else "fill" if detail["changed"] > 8 else one.kind
    if pattern.name == "zero_run" and detail["length"] == one.row.numel:
        kind = "zero"
    return replace(one, kind=kind, pattern=pattern, text=pattern.sentence, form=detail)


def _constant(one: AtomLook, after: LazyTensor) -> AtomLook:
    """Recognise a small tensor that is constant, which suggests initial values although it proves little."""
    values = np.unique(bits(after))
    if len(values) != 1 or one.row.numel < 2:
        return one
    value = number_text(after.element, int(values[0]))
    return replace(
        one, kind="fill", text=f"all {plural(one.row.numel, 'element', 'are')} {value}", form={"value": value}
    )


def _joined(atoms: Atoms, looks: list[AtomLook]) -> None:
    """Assign proved forms of other tensors to tensors too small to prove them, or taken for zeros or a constant."""
    proved: dict[tuple[str, str, str], AtomLook] = {}
    for one in looks:
        if one.kind == "rounded" and one.form.get("through") in FLOATS:
            proved.setdefault((one.atom.role, "rounded", str(one.form["through"])), one)
        elif one.kind == "ratio" and not one.form.get("rounded"):
            proved.setdefault(("", "ratio", str(one.form["ratio"])), one)
    for at, one in enumerate(looks):
        if one.kind not in ("near", "other", "part", "zeros", "zero", "fill", "flip"):
            continue
        before, after = atoms.tensors(one.atom)
        if before.element.name not in FLOATS or before.element != after.element:
            continue
        for (role, kind, _), model in proved.items():
            if role in ("", one.atom.role) and _follows(model, before, after):
                looks[at] = replace(one, kind=kind, form=model.form, text=model.text)
                break


def _follows(model: AtomLook, before: LazyTensor, after: LazyTensor) -> bool:
    """Return whether every element follows a form; for rounding, also if one rank's part is unchanged."""
    if before.shape != after.shape:
        return False
    for run in runs_of(after.shape, after.element.itemsize).ends_first():
        new = bits(after, run.key)
        like = _like(model, before, run.key) == new
        if model.kind == "rounded":
            like |= bits(before, run.key) == new
        if not like.all():
            return False
    return True


def _like(model: AtomLook, before: LazyTensor, key: Any) -> Any:
    x = numbers(bits(before, key), before.element)
    if model.kind == "ratio":
        with np.errstate(over="ignore", invalid="ignore"):
            return encode(rounded(x * float(model.form["ratio"]), before.element.name), before.element)
    return encode(rounded(x, str(model.form["through"]), str(model.form.get("rounding", "nearest"))), before.element)


def rejoined(before: LazyTensor, after: LazyTensor) -> int:
    """Return the number of equal column shards of a matrix that were joined along its rows; 0 if none.

    Up to ``SAMPLED`` rows, spread over the matrix, are compared bit for bit.
    """
    if len(after.shape) != 2 or after.shape != before.shape:
        return 0
    rows, columns = before.shape
    looked = np.unique(np.linspace(0, rows - 1, SAMPLED).astype(np.int64)).tolist()
    # joined, the shards are a matrix of rows * shards lines: line n is row n % rows of shard n // rows
    for shards in (n for n in SHARDS if columns % n == 0 and columns > n):
        width = columns // shards

        def line(n: int, width: int = width) -> Any:
            shard, row = divmod(n, rows)
            return bits(before, (row, slice(shard * width, (shard + 1) * width)))

        if all(
            np.array_equal(bits(after, (row, slice(part * width, (part + 1) * width))), line(row * shards + part))
            for row in looked
            for part in range(shards)
        ):
            return shards
    return 0


def _zeros(one: AtomLook, before: LazyTensor, after: LazyTensor) -> bool:
    """Return whether all changed elements became zero, except at page boundaries that cut an element."""
    box = one.row.comparison
    if box is None or box.changed < 16:
        return False
    left = 0
    for run in runs_of(after.shape, after.element.itemsize).ends_first():
        old, new = bits(before, run.key).reshape(-1), bits(after, run.key).reshape(-1)
        left += int(np.count_nonzero((old != new) & (new << 1 != 0)))  # a mask makes negative ones −0
        if left > 2:
            return False
    return True
