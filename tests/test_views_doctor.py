"""What people read of a diagnosis: verdict first, bounded, and harmless whatever a name holds."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import workbench as wb
from tests import lab
from tests.test_lab import SMALL
from tests.test_views import ALLOWED, FORBIDDEN, _Strict
from workbench.analysis.report import Finding
from workbench.doctor.facts.evidence import Evidence, State
from workbench.doctor.facts.gather import gather
from workbench.doctor.ledger.sign import RULES, Cleared, Sign
from workbench.doctor.reasoning.diagnosis import Diagnosis, Subject, Suspect
from workbench.doctor.rules.facts import check_facts
from workbench.doctor.rules.values import check_one, check_pair
from workbench.views.doctor import SCREEN, diagnosis_lines, diagnosis_text
from workbench.views.doctor_html import diagnosis_html, diagnosis_page
from workbench.views.lines import WIDEST

EVIL = "layer\x1b[2J\u202e<img src=x onerror=alert(1)>.weight"


def state(path: object) -> State:
    ckpt = wb.open(str(path), cache=False)
    return State(ckpt, gather(ckpt))


def suspect(cause: str, signs: tuple[Sign, ...], **said: object) -> Suspect:
    made = {
        "title": "the optimizer state was not loaded",
        "severity": signs[0].severity,
        "certainty": "certain",
        "excludes": {"A1": "weights are equal bit for bit"},
        "since": 60,
        "tensors": signs[0].tensors,
        "affected": len(signs[0].tensors),
        "share": 1.0,
        "damage": ("about 60 updates are too large",),
        "remedy": "load the optimizer",
        "settle": "an echo",
    }
    return Suspect(cause, signs=signs, **{**made, **said})  # type: ignore[arg-type]


def diagnosis(suspects: list[Suspect], **said: object) -> Diagnosis:
    found = [Finding(s.rule, s.severity, "", s.message, s.evidence) for one in suspects for s in one.signs]
    made = {
        "subjects": (Subject("before", "run/step-60", "dcp", 60), Subject("after", "run/step-61", "dcp", 61)),
        "verdict": "The optimizer state did not survive the load.",
        "causes": tuple(suspects),
        "ruled_out": (Cleared("weights", "40 of 40 equal bit for bit", ("A1", "A2", "E1", "E2", "E3", "F7")),),
    }
    checked, not_checked = {"S01": "after"}, {"S18": "no data position is stored", "N11": "no data position is stored"}
    plain = Diagnosis.of("run/step-60", found, checked, not_checked)
    return replace(plain, **{**made, **said})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def dropped() -> Diagnosis:
    """A dropped optimizer one update after the resume: every sign that the rules give it, as one cause."""
    case = lab.case("f01_drop_opt", SMALL, "dcp", k=1)
    evidence = Evidence(state(case.before), state(case.after), state(case.echo))
    pair = check_pair(evidence.pair("before", "after"))
    facts = check_facts(evidence)
    signs = [*check_one(evidence.state("echo")).signs, *pair.signs, *facts.signs]
    order = {"error": 0, "warn": 1, "info": 2}
    signs.sort(key=lambda sign: order[sign.severity])
    subjects = tuple(
        Subject(
            which, evidence.state(which).ckpt.path, evidence.state(which).ckpt.format, evidence.state(which).ckpt.step
        )
        for which in ("before", "echo", "after")
    )
    not_checked = {**facts.not_checked, **pair.not_checked}
    return diagnosis([suspect("B1", tuple(signs))], subjects=subjects, not_checked=not_checked)


def evil() -> Diagnosis:
    sign = Sign("S01", "error", f"{EVIL!s} has 3 NaN", {}, (EVIL, EVIL + "2", EVIL + "3"), 3, 40)
    one = suspect("G1", (sign,), title=EVIL, remedy=EVIL, settle=EVIL, damage=(EVIL,), excludes={"A1": EVIL})
    subjects = (Subject("before", f"/runs/{EVIL}", "dcp", None),)
    facts = {"before": {EVIL: (EVIL, EVIL)}}
    ruled = (Cleared(EVIL, EVIL, ("A1",)),)
    return diagnosis(
        [one],
        verdict=EVIL,
        subjects=subjects,
        facts=facts,
        ruled_out=ruled,
        not_checked={EVIL: EVIL},
        checked={"x": EVIL},
    )


# ---- text ----------------------------------------------------------------------------------------------------------


def test_the_first_lines_say_what_why_since_when_what_to_do_and_how_sure(dropped):
    lines = diagnosis_text(dropped).split("\n")
    assert len(lines) <= SCREEN and max(map(len, lines)) <= WIDEST
    heads = [
        "RESUME DOCTOR",
        "ERROR  the optimizer state was not loaded",
        "  since     step 60",
        "  proof",
        "  expect",
        "  do        load the optimizer",
        "  sure      certain",
    ]
    at = [next(i for i, line in enumerate(lines) if line.startswith(head)) for head in heads]
    assert at == sorted(at) and at[1] == 1 + len(dropped.subjects)
    assert "weights are equal bit for bit" in "\n".join(lines)


def test_the_first_screen_has_no_ids_of_rules_or_causes(dropped):
    paths = {one.path for one in dropped.subjects}
    text = "\n".join(line for line in diagnosis_text(dropped).split("\n") if not any(path in line for path in paths))
    assert not re.search(r"\b[SRPNV][0-9]{1,2}\b|\b[A-H][0-9]{1,2}\b", text)


def test_everything_names_every_rule_with_its_whole_sentence(dropped):
    everything = " ".join(" ".join(diagnosis_lines(dropped)).split())
    assert len(dropped.causes[0].signs) > 6
    assert all(re.search(rf"\b{sign.rule}\b", everything) for sign in dropped.causes[0].signs)
    assert all(" ".join(sign.message.split()) in everything for sign in dropped.causes[0].signs)
    assert "…" not in diagnosis_lines(dropped)[-1]


def test_measurements_that_do_not_fit_are_counted(dropped):
    signs = [sign for sign in dropped.causes[0].signs if sign.severity != "info"]
    assert f"… and {len(signs) - 3} further measurements" in diagnosis_text(dropped)


def test_a_question_says_when_nothing_is_wrong():
    sign = Sign("S17", "warn", "the schedule is at 3")
    one = suspect("C1", (sign,), certainty="likely", question="was that intended?", severity="warn")
    text = " ".join(diagnosis_text(diagnosis([one])).split())
    assert "likely" in text and "Was that intended? If so, nothing is wrong" in text and "certain" not in text


def test_a_doubt_names_the_runner_up():
    one = suspect("B6", (Sign("S04", "error", "m² > K·v"),), certainty="likely", runner_up="Parts are of two saves.")
    assert "It could also be: Parts are of two saves." in " ".join(diagnosis_text(diagnosis([one])).split())


def test_nothing_found_says_in_what():
    none = diagnosis([], verdict="No fault found in what was compared: 26 of 26 weights, 2 of 52 moments.")
    assert "No fault found in what was compared: 26 of 26 weights, 2 of 52 moments." in diagnosis_text(none)


def test_the_object_shows_itself(dropped):
    assert repr(dropped) == diagnosis_text(dropped) and dropped._repr_html_() == diagnosis_html(dropped)


def test_what_is_excluded_is_listed_in_runs_where_everything_is_printed(dropped):
    assert "40 of 40 equal bit for bit (not A1, A2, E1–E3, F7)" in "\n".join(diagnosis_lines(dropped))


def test_reasons_are_listed_once():
    text = "\n".join(diagnosis_lines(diagnosis([])))
    assert text.count("no data position is stored") == 1 and "S18, N11: no data position is stored" in text


def test_a_finding_without_a_cause_is_not_lost():
    one = Finding("S02", "warn", "", "one weight is 900 times the median", {})
    assert re.search(r"ALSO SEEN +one weight is 900 times the median", diagnosis_text(diagnosis([], _found=(one,))))
    everything = "\n".join(diagnosis_lines(diagnosis([], _found=(one,))))
    assert re.search(r"ALSO SEEN +S02 \(warn\) one weight is 900 times the median", everything)


def test_many_causes_and_many_reasons_stay_on_a_screen():
    signs = tuple(Sign(f"P{n:02}", "error", f"law {n} is broken " + "in many words " * 20) for n in range(12))
    causes = [suspect(f"E{n}", signs, excludes={f"A{m}": "not so" for m in range(9)}) for n in range(9)]
    reasons = {f"N{n}": f"reason {n} " + "word " * 40 for n in range(30)}
    ruled = tuple(Cleared(f"thing {n}", "is equal " * 30) for n in range(12))
    found = diagnosis(causes, not_checked=reasons, ruled_out=ruled)
    lines = diagnosis_text(found).split("\n")
    assert len(lines) <= SCREEN and max(map(len, lines)) <= WIDEST
    assert any("and 5 further causes" in line for line in lines) and any(
        "30 checks could not" in line for line in lines
    )
    assert len(diagnosis_lines(found)) > 200


def test_names_are_harmless_in_text():
    for text in ("\n".join(diagnosis_lines(evil())), diagnosis_text(evil())):
        assert not FORBIDDEN.search(text.replace("\n", "")) and "\\x1b[2J\\u202e" in text


# ---- html ----------------------------------------------------------------------------------------------------------


def test_names_are_harmless_in_html():
    for text in (diagnosis_html(evil()), diagnosis_page(evil())):
        assert "<img" not in text and "&lt;img" in text and not FORBIDDEN.search(text.replace("\n", ""))


def test_the_html_says_the_same_as_the_text(dropped):
    html = diagnosis_html(dropped)
    order = [html.index(words) for words in (dropped.verdict, "B1</code>", "found correct", "not checked")]
    assert order == sorted(order)
    assert all(sign.rule in html for sign in dropped.causes[0].signs)
    strict = _Strict()
    strict.feed(html)
    assert strict.stack == [] and strict.tags <= ALLOWED | {"ul", "li"}
    assert not re.search(r"color\s*:|background|#[0-9a-fA-F]{3,6}\b", html)


def test_a_page_reaches_for_nothing(dropped):
    page = diagnosis_page(dropped)
    assert page.startswith("<!DOCTYPE html>") and not re.search(r"(src|href)=", page)
    assert all(rule in RULES for rule in {sign.rule for sign in dropped.causes[0].signs})
