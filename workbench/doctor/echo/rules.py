"""The R rules on values: a load makes no update, so that everything is equal bit for bit, or has a form that tells why.

``R01 R10 R11`` are facts' (:mod:`workbench.doctor.facts.two`).
"""

from __future__ import annotations

from workbench.doctor.sign import Rule, register

__all__ = ["ECHO"]

TRIP = "round trip"
EQUAL = "loading makes no update: bit for bit the same"

_RULES = (
    Rule("R02", "another tensor's values", ("E9", "E3", "B5", "E10"), "echo", EQUAL,
         "exact: all rows are those of one other tensor of before", TRIP, "error", "tensors renumbered on purpose",
         "load by name, and check the numbering of layers, experts and optimizer parameters"),
    Rule("R03", "a state that is fresh, lost or no number", ("B1", "B4", "B3", "A5", "D9", "G1"), "echo", EQUAL,
         "exact: all zero, gone, or not finite, where before it was", TRIP, "error",
         "an optimizer reset on purpose", "load the optimizer's state and the buffers"),
    Rule("R04", "rows in another order", ("E1", "E5", "E6", "F7"), "echo", EQUAL,
         "exact: the same rows at other places", TRIP, "error",
         "a layout that is converted on purpose (rotary halves, heads) together with the code that reads it",
         "read with the layout that was written: order of ranks, heads, rotary halves, vocabulary"),
    Rule("R05", "columns in another order", ("E1", "E6"), "echo", EQUAL, "exact: the same columns at other places",
         TRIP, "error", "as R04", "join ranks in their order, along the dimension that was cut"),
    Rule("R06", "flipped bits", ("G2", "G1", "G3"), "echo", EQUAL,
         "exact: at most eight elements differ, each in one bit", TRIP, "error", "none",
         "load again; if it stays, take the tensor from another copy and look at memory and storage"),
    Rule("R07", "values went through a narrower type", ("D1", "D4", "D7"), "echo", EQUAL,
         "exact: all are the old ones rounded", TRIP, "error", "states kept in 16 bits on purpose (moments: warn)",
         "save and load masters and moments in float32"),
    Rule("R08", "runs of zeros", ("G5", "G4"), "echo", EQUAL, "exact: what differs is one run that became zero", TRIP,
         "error", "none", "copy the file again; check that writes were synced before the save was called complete"),
    Rule("R09", "values differ", ("G6", "A2", "D2", "F4"), "echo", EQUAL, "exact", TRIP, "error",
         "a change that the load makes on purpose (averaged or merged weights)",
         "load weights, masters and moments of one save"),
    Rule("R13", "rows of several tensors mixed", ("E2", "E4", "E1"), "echo", EQUAL,
         "exact: every row is one of before, of two or more tensors", TRIP, "error", "as R04",
         "cut fused tensors per rank and per group before joining: gate and up, query, key and value"),
)  # fmt: skip
register(*_RULES)
ECHO = {rule.id: rule for rule in _RULES}
