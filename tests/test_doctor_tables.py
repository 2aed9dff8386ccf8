"""The page of rules and causes is made from the tables that the doctor works with, and those hang together."""

from __future__ import annotations

from pathlib import Path

from workbench.doctor.causes.table import CAUSES, CHAPTERS
from workbench.doctor.tables import all_rules, rendered

PAGE = Path(__file__).resolve().parents[1] / "docs" / "doctor_rules.md"


def test_the_page_is_what_the_tables_say():
    """After a change: python -m workbench.doctor.tables > docs/doctor_rules.md"""
    assert PAGE.read_text("utf-8") == rendered()


def test_every_rule_and_every_cause_has_its_row():
    rows = [line for line in rendered().split("\n") if line.startswith("| **")]
    names = [line.split("**")[1] for line in rows]
    order = ("one", "echo", "pair", "run")
    assert names == [*CAUSES, *(rule.id for needs in order for rule in all_rules() if rule.needs == needs)]
    assert all(name[0] in CHAPTERS for name in CAUSES)


def test_every_row_has_as_many_cells_as_its_head():
    width = 0
    for line in rendered().split("\n"):
        cells = line.replace("\\|", "").count("|")
        if line.startswith("|---"):
            width = cells
        elif line.startswith("| **"):
            assert cells == width, line


def test_rules_speak_for_causes_that_exist():
    for rule in all_rules():
        assert set(rule.causes) <= set(CAUSES), rule.id
