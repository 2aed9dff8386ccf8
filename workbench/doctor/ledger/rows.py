"""The table of measurements, one row per quantity. Sentences are queries over it, and causes are patterns in it.

::

    leg      quantity     status         form     parameters     elements
    load     param        equal                   26 of 26       129,456            before → echo: nothing may change
    load     exp_avg      beyond         zero     52 of 52       258,912
    load     lr           beyond         lower    2 of 2
    train    exp_avg_sq   within                  50 of 52       258,000            k updates: the laws of the optimizer
    train    exp_avg_sq   not compared            2 of 52                           moments are stored as uint8
    after    master       absent

A quantity without a row was not examined, and no sentence mentions it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from workbench.doctor.ledger.roles import AVERAGES, BUFFERS, MASTERS, MOMENTS, STATE, WEIGHTS

#: Common names for several quantities together.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "weights": WEIGHTS,
    "masters": MASTERS,
    "moments": MOMENTS,
    "averages": AVERAGES,
    "buffers": BUFFERS,
    "other optimizer tensors": (STATE,),
}
#: Where something was measured: one checkpoint, the load (before → echo), the updates after it.
LEGS = ("before", "echo", "after", "load", "train")


NUMBERED = "optimizer"  #: prefix of pseudo-names of numbered optimizer state


class Status(StrEnum):
    """The result of comparing a quantity with its law."""

    EQUAL = "equal"  #: bit for bit
    WITHIN = "within"  #: moved as the law allows
    BEYOND = "beyond"  #: the law is broken; in the load: anything that is not equal
    ABSENT = "absent"  #: stored before but not now
    SKIPPED = "not compared"  #: the row has the reason


KEPT = (Status.EQUAL, Status.WITHIN)
STATES = (*MOMENTS, STATE)


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        leg: a member of :data:`LEGS`.
        quantity: a stored role (``exp_avg``), or a value that a trainer stores beside tensors (``lr``, ``step``).
        form: the recognised form of a broken law: ``zero``, ``moved.layer``, ``rounded`` …
        names: parameters; empty for a quantity of the run as a whole.
        elements: the number of compared elements. why: the reason, if not compared.
        exact: the form was proved on every element.
        detail: numbers of the form by parameter, or of the row.
    """

    leg: str
    quantity: str
    status: Status
    form: str = ""
    names: tuple[str, ...] = ()
    elements: int = 0
    why: str = ""
    exact: bool = True
    detail: Mapping[str, Any] = field(default_factory=dict)


class LedgerLeg:
    """One leg of the ledger, by groups of quantities.

    Attributes:
        leg: ``load`` or ``train``.
        exact: whether equality is its law.
        weights: quantities that hold the weights; for updates also the masters, which the optimizer updates.
    """

    def __init__(self, leg: str, rows: Iterable[Row]) -> None:
        self.leg, self.exact = leg, leg == "load"
        self.weights = WEIGHTS if leg != "train" else (*WEIGHTS, *MASTERS)
        self._rows = [row for row in rows if row.leg == leg]
        self._seen: dict[str, set[str]] = {}
        self._form: dict[str, dict[str, str]] = {}
        self._detail: dict[tuple[str, str], Mapping[str, Any]] = {}
        self._unknown: dict[str, set[str]] = {}
        for row in self._rows:
            if row.status is Status.SKIPPED:
                self._unknown.setdefault(row.quantity, set()).update(row.names)
                continue
            self._seen.setdefault(row.quantity, set()).update(row.names)
            if row.status in (Status.BEYOND, Status.ABSENT):
                form = "absent" if row.status is Status.ABSENT else row.form
                self._form.setdefault(row.quantity, {}).update(dict.fromkeys(row.names, form))
                for name in row.names:
                    self._detail[row.quantity, name] = row.detail.get(name, row.detail)

    @property
    def rows(self) -> list[Row]:
        return self._rows

    @property
    def quantities(self) -> set[str]:
        """The quantities that were compared for one or more parameters."""
        return set(self._seen)

    def seen(self, *quantities: str) -> set[str]:
        """Return the parameters for which one or more of the quantities were compared."""
        return set().union(*(self._seen.get(quantity, ()) for quantity in quantities))

    def hit(self, quantities: Iterable[str], *forms: str) -> set[str]:
        """Return the parameters with a quantity beyond its law, only those with one of ``forms`` if given.

        A form that ends in ``.`` matches every form that starts with it.
        """
        whole = {one for one in forms if not one.endswith(".")}
        starts = tuple(one for one in forms if one.endswith("."))
        found: set[str] = set()
        for quantity in quantities:
            held = self._form.get(quantity, {})
            if not forms:
                found.update(held)
                continue
            # there are few distinct forms, and each name has one
            meant = {form for form in set(held.values()) if form in whole or form.startswith(starts)}
            if meant:
                found.update(name for name, form in held.items() if form in meant)
        return found

    def forms(self, quantities: Iterable[str]) -> dict[str, set[str]]:
        """Return form → parameters."""
        found: dict[str, set[str]] = {}
        for quantity in quantities:
            for name, form in self._form.get(quantity, {}).items():
                found.setdefault(form, set()).add(name)
        return found

    def detail(self, quantities: Iterable[str], name: str) -> Mapping[str, Any]:
        """Return the numbers of a form."""
        return next((self._detail[q, name] for q in quantities if (q, name) in self._detail), {})

    def clean(self, quantities: Iterable[str], names: Iterable[str] | None = None) -> set[str]:
        """Return the parameters with one or more of the quantities compared and none beyond its law."""
        quantities = tuple(quantities)
        found = self.seen(*quantities) - self.hit(quantities)
        return found if names is None else found & set(names)

    def partly(self, *forms: str) -> set[str]:
        """Return the parameters with optimizer state in one of ``forms`` while other state of theirs continued."""
        rows = [row for row in self._rows if row.quantity in STATES and row.status in KEPT]
        rows = [row for row in rows if row.exact or row.quantity != STATE]  # copies of weights resemble old ones
        kept = {name for row in rows for name in row.names}
        return kept & self.hit(STATES, *forms)

    def proved(self, quantities: Iterable[str], form: str) -> bool:
        """Return whether every row of that form was proved by equality or an exact law."""
        wanted = set(quantities)
        return all(row.exact for row in self._rows if row.quantity in wanted and row.form == form)

    def moments(self, names: Iterable[str]) -> set[str]:
        """Return those of ``names`` with moments beyond their law; numbered moments may belong to any of them."""
        return {name for name in self.hit(MOMENTS) if name in set(names) or name.startswith(NUMBERED)}

    def whole(self, quantities: Iterable[str], names: Iterable[str], share: float = 0.9) -> bool:
        """Return whether ``names`` cover ``share`` or more of the parameters for which the quantities were compared.

        Weights without a law count as well: those that became others are recognised without one.
        """
        quantities = tuple(quantities)
        seen = self.seen(*quantities)
        if self.leg == "train":
            seen |= set().union(*(self._unknown.get(one, ()) for one in quantities if one in (*WEIGHTS, *MASTERS)))
        return bool(seen) and len(seen & set(names)) >= share * len(seen)


class Ledger:
    """All rows of a diagnosis."""

    def __init__(self) -> None:
        self._rows: list[Row] = []

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, *rows: Row) -> None:
        self._rows += rows

    def change(self, leg: str) -> LedgerLeg:
        """Return the rows of that leg."""
        return LedgerLeg(leg, self._rows)

    def count(self, leg: str, quantities: Iterable[str], *statuses: Status) -> tuple[int, int]:
        """Count tensors and elements of those quantities on a leg, only those with one of ``statuses`` if given."""
        wanted = set(quantities)
        rows = [
            row
            for row in self._rows
            if row.leg == leg and row.quantity in wanted and (not statuses or row.status in statuses)
        ]
        return sum(len(row.names) for row in rows), sum(row.elements for row in rows)

    def reasons(self, leg: str, quantities: Iterable[str]) -> dict[str, int]:
        """Return the reasons why quantities were not compared → number of tensors."""
        wanted, found = set(quantities), dict[str, int]()
        for row in self._rows:
            if row.leg == leg and row.quantity in wanted and row.status is Status.SKIPPED:
                found[row.why] = found.get(row.why, 0) + max(len(row.names), 1)
        return found

    def to_dict(self) -> list[dict[str, Any]]:
        """Return the rows in JSON's types, each with its count and up to a hundred names."""
        return [
            {
                "leg": row.leg,
                "quantity": row.quantity,
                "status": str(row.status),
                "form": row.form,
                "count": len(row.names),
                "names": list(row.names[:100]),
                "elements": row.elements,
                "why": row.why,
                "exact": row.exact,
            }
            for row in self._rows
        ]
