"""Render the catalogue as a page: every cause and every rule, from the tables that the code uses.

::

    python -m workbench.doctor.tables > docs/doctor_rules.md        after a rule or a cause was changed
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Iterable, Iterator
from importlib import import_module

from workbench.doctor.causes.cause import Cause
from workbench.doctor.causes.table import CAUSES, CHAPTERS
from workbench.doctor.ledger.sign import NEEDS, RULES, Rule

INTRODUCTION = """\
# Causes and rules of the doctor

How to read a diagnosis: [doctor.md](doctor.md). This page is generated from the tables in the code
(`python -m workbench.doctor.tables`); a test checks that it is up to date.

A **rule** reports a **sign** when a law does not hold; signs support **causes**. Only an exact law may report `error`;
a statistic reports at most `warn`. The letter of a rule shows what it needs: S one checkpoint, R a checkpoint and its
echo, P two checkpoints some updates apart, V the checks of `workbench verify`. N rules were added later; each needs one
of these. If a source is *catalogue*, the threshold comes from runs of the tests' lab (`tests/lab`), not from a proof.
*Seen in* refers to issues, pull requests and discussions of the projects.
"""


def all_rules() -> list[Rule]:
    """Return every rule; importing the doctor's modules fills the table."""
    package = import_module("workbench.doctor")  # the facade's attribute of that name is a function
    for module in pkgutil.walk_packages(package.__path__, "workbench.doctor."):
        import_module(module.name)
    return [RULES[name] for name in sorted(RULES, key=_order)]


def rendered() -> str:
    """Return the page in Markdown."""
    return "\n".join([INTRODUCTION, *_causes(), *_rules(all_rules())]) + "\n"


def _causes() -> Iterator[str]:
    yield "## Causes\n"
    for letter, chapter in CHAPTERS.items():
        causes = [cause for name, cause in CAUSES.items() if name.startswith(letter)]
        yield f"### {letter}: {chapter}\n"
        yield from _table(("id", "what happened", "how it happens", "symptom", "seen in"), map(_cause, causes))
        yield ""
        yield from (line for cause in causes for line in _remedies(cause))
        yield ""


def _cause(cause: Cause) -> tuple[str, ...]:
    threads = [one for one in re.split(r"[;,] ", cause.source) if not one.startswith("catalogue")]
    return f"**{cause.id}**", cause.title, cause.mechanism, cause.symptom, ", ".join(threads)


def _remedies(cause: Cause) -> Iterator[str]:
    settles = f" Evidence that settles doubts: {cause.settles}." if cause.settles else ""
    yield f"- **{cause.id}** {_cell(cause.remedies[''])}.{_cell(settles)}"
    yield from (f"  - {framework}: {_cell(words)}" for framework, words in cause.remedies.items() if framework)


def _rules(rules: list[Rule]) -> Iterator[str]:
    yield "## Rules"
    for needs, words in NEEDS.items():
        those = [rule for rule in rules if rule.needs == needs]
        if those:
            yield f"\n### Rules that need {words}\n"
            heads = (
                "id",
                "sign",
                "law",
                "threshold",
                "max severity",
                "supports",
                "possible false alarms",
                "remedy",
                "source",
            )
            yield from _table(heads, map(_rule, those))


def _rule(rule: Rule) -> tuple[str, ...]:
    return (
        f"**{rule.id}**",
        rule.title,
        rule.law,
        rule.threshold,
        f"`{rule.severity}`",
        " ".join(rule.causes),
        rule.risk,
        rule.remedy,
        rule.source,
    )


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for row in rows:
        yield f"| {' | '.join(map(_cell, row))} |"


def _cell(text: str) -> str:
    """Escape a text for Markdown."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("\\*\\*", "**").replace("\n", " ")


def _order(name: str) -> tuple[str, int, str]:
    digits = "".join(char for char in name if char.isdecimal())
    return name[:1], int(digits or 0), name


if __name__ == "__main__":
    print(rendered(), end="")
