"""Turn the findings of verify on the files of a checkpoint into signs.

::

    verify      coverage.hole  replicas.differ  checksum.mismatch  values.zero_pages  manifest.changed …
                      │               │                │                  │                 │
    signs           N18 (E8)       S12 (F1 G6)     V02 (G10 …)        S11 (G5)          V03 (G2 …)

Passes over values that the doctor makes itself (numbers, masters, ties) are left out. Verify reads bytes again for
stored checksums, for replicas and for a manifest, and searches every page of the files for zeros.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from workbench.analysis.report import SEVERITIES, Finding
from workbench.analysis.verify.boxes import check_boxes
from workbench.analysis.verify.commit import check_commit
from workbench.analysis.verify.files import check_files as check_sizes
from workbench.analysis.verify.headers import check_headers, check_index, check_objects, headers_nbytes
from workbench.analysis.verify.log import Examined, Log
from workbench.analysis.verify.pairs import check_pairs, pairs_nbytes
from workbench.analysis.verify.siblings import check_folder
from workbench.analysis.verify.state import check_ranks, check_state
from workbench.analysis.verify.stored import StoredSums, check_manifest, manifest_nbytes
from workbench.analysis.verify.values import check_values, values_nbytes
from workbench.core.scan import Progress, part_of
from workbench.core.words import plural
from workbench.doctor.facts.evidence import State
from workbench.doctor.ledger.sign import RULES, SAVED, Cleared, Inapplicable, Outcome, Rule, Sign, register

LIST = 100
VERIFY = "workbench.analysis.verify"

register(
    Rule("S11", "zeros where a write was lost", ("G5",), "one",
         "numbers do not become zero at page boundaries of a file",
         "a run that begins and ends on pages, chance < 1/50; proved by a wrong checksum of the bytes",
         f"{VERIFY}.pages", "error", "rows that got no gradient and happen to fill pages",
         "restore the file: a crash or an overwritten memory map left pages empty"),
    Rule("S12", "replicas differ", ("F1", "G6"), "one", "replicas stored by several ranks are equal", "bit for bit",
         f"{VERIFY}.pairs", "error", "norms that each rank trains for itself on purpose",
         "find the rank that drifted; the run depends on the replica that the loader takes"),
    Rule("N18", "elements stored twice or nowhere", ("E8", "E7"), "one", "the chunks of a tensor tile it", "exact",
         f"{VERIFY}.boxes", "error", "none", "restore the rank's part; metadata and shards must come from one save"),
    Rule("N19", "a layer is absent", ("E9", "A2"), "one", "a stack has every layer from its first to its last", "exact",
         f"{VERIFY}.state", "warn", "pruned models", "check the mapping of pipeline stages to layers"),
    Rule("V01", "files are missing, short or damaged", ("G4", "G8"), "one",
         "everything that the metadata names is present", "exact",
         f"{VERIFY}.files", "error", "none", "restore the files, or resume from another step"),
    Rule("V02", "stored checksums are wrong", ("G10", "G2", "G1", "G5"), "one", "bytes have the checksum of the save",
         "exact", f"{VERIFY}.stored", "error", "files that were edited on purpose", "restore the file from a copy"),
    Rule("V03", "bytes that differ from the manifest", ("G2", "G1", "G3", "G10", "G5"), "one",
         "bytes equal those that were hashed", "exact", "workbench.analysis.manifest_check", "error",
         "files that were rewritten on purpose", "restore the files that differ from a copy"),
    Rule("V04", "files of two saves", ("G6", "G8"), "one", "the files of a save are written together",
         "an hour apart, 5 times the rest", f"{VERIFY}.siblings", "warn", "copied files with other time stamps",
         "compare the file with a copy that you trust"),
    Rule("V05", "a part of the optimizer's state is absent", ("B1", "A2"), "one", "every trained weight has all states",
         "nine in ten have it", f"{VERIFY}.state", "warn", "parameters that were frozen",
         "load the missing state from the previous save"),
)  # fmt: skip

#: Rule of verify → rule of the doctor; omitted rules are checked by the doctor itself or do not concern a resume.
MEANS = {
    "values.zero_pages": "S11", "values.zero_chunk": "S11", "files.sparse": "S11", "values.all_zero": "S11",
    "replicas.differ": "S12", "coverage.hole": "N18", "coverage.overlap": "N18", "coverage.shared_bytes": "N18",
    "names.layer_gap": "N19", "checksum.mismatch": "V02", "checksum.damaged": "V02", "digest.mismatch": "V02",
    "digest.unreadable": "V02", "files.age": "V04", "files.unlisted": "V04", "state.partner": "V05",
    "state.orphan": "V05", "commit.partner": "V05",
    **dict.fromkeys(("files.missing", "files.truncated", "files.unreadable", "files.empty", "files.leftover",
                     "commit.incomplete", "commit.tracker", "ranks.gap", "ranks.grid", "index.unlisted",
                     "headers.damaged", "headers.shape", "headers.dtype", "objects.unreadable", "read.failed"), "V01"),
    **dict.fromkeys(("manifest.missing", "manifest.size", "manifest.truncated", "manifest.changed",
                     "manifest.unreadable"), "V03"),
}  # fmt: skip
#: Narrower causes of some findings.
CAUSES = {
    "values.all_zero": ("A2", "G5"),
    "files.missing": ("G8", "G4"),
    "commit.incomplete": ("G8",),
    "commit.tracker": ("G8",),
    "files.leftover": ("G8",),
    "ranks.gap": ("G8", "G4"),
    "ranks.grid": ("G8", "G4"),
    "files.truncated": ("G4",),
    "files.empty": ("G4",),
    "manifest.missing": ("G8", "G4"),
    "manifest.truncated": ("G4",),
    "manifest.size": ("G4", "G6"),
}


def check_files(
    state: State,
    *,
    deep: bool = True,
    manifest: Any = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Check files, coverage, stored checksums, replicas and a manifest of one checkpoint.

    Args:
        deep: also read bytes: pages, checksums, replicas.
        manifest: a manifest, or its path; by default, one in or beside the checkpoint.
        progress: called with the fraction done; stops by raising.
    """
    log = Log()
    place = state.ckpt.place.again()
    subject = Examined(state.ckpt, place, log, threads)
    passes: list[tuple[int, Callable[[Progress | None], object]]] = [
        (headers_nbytes(subject), lambda at: _structure(subject, at)),
    ]
    if deep:
        sums = StoredSums(subject)
        passes += [
            (values_nbytes(subject), lambda at: check_values(subject, sums.summed, at, numbers=False)),
            (sums.nbytes, sums.check),
            (pairs_nbytes(subject), lambda at: check_pairs(subject, at, kinds=("replicas",))),
            (manifest_nbytes(place, manifest), lambda at: check_manifest(place, log, manifest, threads, at)),
        ]
    total, done = max(sum(nbytes for nbytes, _ in passes), 1), 0
    for nbytes, run in passes:
        run(part_of(progress, done / total, nbytes / total))
        done += nbytes
    return _outcome(state, log, deep)


def _structure(subject: Examined, progress: Progress | None) -> None:
    check_sizes(subject)
    check_folder(subject)
    check_commit(subject)
    check_boxes(subject)
    check_headers(subject, progress)
    check_index(subject)
    check_objects(subject)
    check_ranks(subject)
    check_state(subject)


# ---- findings to signs ---------------------------------------------------------------------------------------------


def _outcome(state: State, log: Log, deep: bool) -> Outcome:
    found = Outcome()
    groups: dict[str, list[Finding]] = defaultdict(list)
    role = dict(zip(state.ckpt.catalog.keys, state.ckpt.roles, strict=True))
    for finding in log.report(""):
        # the rules on values handle moments of a parameter that got no gradient
        idle = finding.rule == "values.all_zero" and not _trained(state, finding.where, role)
        if finding.rule in MEANS and finding.severity != "info" and not idle:
            groups[finding.rule].append(finding)
    empty = _zeros(groups)
    found.signs = [
        sign for rule, group in groups.items() if (sign := _sign(state, rule, group, groups, empty)) is not None
    ]
    fired = {sign.rule for sign in found.signs}
    _checked(state, log, found, fired, deep)
    return found


def _trained(state: State, key: str, role: Mapping[str, str]) -> bool:
    """Return whether the checkpoint shows that the optimizer updates this weight; a frozen bias may be zero."""
    if role.get(key) not in ("param", "master"):
        return False
    catalog = state.ckpt.catalog
    held = state.params.get(state.ckpt.fqns[catalog.index[key]] or "", {})
    several = any("exp_avg_sq" in roles for roles in state.params.values())
    return not several or "exp_avg_sq" in held


def _sign(
    state: State, rule: str, group: Sequence[Finding], groups: Mapping[str, Sequence[Finding]], empty: set[str]
) -> Sign | None:
    mine = RULES[MEANS[rule]]
    spelled = [finding for finding in group if "more" not in finding.evidence]
    count = len(spelled) + sum(int(finding.evidence.get("more", 0)) for finding in group)
    if not spelled:
        return None
    first = spelled[0]
    severity = max(SEVERITIES.index(mine.severity), min(SEVERITIES.index(finding.severity) for finding in group))
    causes = CAUSES.get(rule, ())
    if rule == "values.zero_pages" and _proved(spelled, groups.get("checksum.mismatch", ())):
        severity, causes = 0, ("G5",)
    elif rule == "checksum.mismatch" and all(finding.evidence.get("file") in empty for finding in spelled):
        causes = ("G5", "G10")
    elif rule == "manifest.changed":
        causes = _rewritten(spelled)
    elif rule == "replicas.differ":
        causes = _drift(state, spelled, count)
    names = _fqns(state, spelled)
    words = f"{first.where!r} {first.message}" if first.where else first.message
    words += f"; {count - 1:,} more" if count > 1 else ""
    evidence = {"kind": rule, "count": count, "first": dict(first.evidence), "where": [f.where for f in spelled][:LIST]}
    return mine.sign(words, evidence, names[:LIST], severity=SEVERITIES[severity], hit=count, causes=causes)


def _zeros(groups: Mapping[str, Sequence[Finding]]) -> set[str]:
    """Return the files with pages of zeros."""
    return {str(finding.evidence.get("file")) for finding in groups.get("values.zero_pages", ())}


def _proved(pages: Sequence[Finding], wrong: Sequence[Finding]) -> bool:
    """Return whether a checksum of the same bytes is wrong, which proves that they were not zero when written."""
    for page in pages:
        for record in wrong:
            apart = (
                record.evidence["stop"] <= page.evidence["start"] or page.evidence["stop"] <= record.evidence["start"]
            )
            if page.evidence["file"] == record.evidence["file"] and not apart:
                return True
    return False


def _rewritten(changed: Sequence[Finding]) -> tuple[str, ...]:
    """Return the causes: flips if a block or two differ, another save's bytes if many do."""
    if any(finding.evidence.get("stretches") for finding in changed):
        return ("G6", "G7", "G10")
    return ("G2", "G1", "G3", "G10", "G5")


def _drift(state: State, differing: Sequence[Finding], count: int) -> tuple[str, ...]:
    """Return the causes: files of another step if counters or most replicas differ, drift if only some do."""
    catalog = state.ckpt.catalog
    role = dict(zip(catalog.keys, state.ckpt.roles, strict=True))
    several = len(np.unique(catalog.tensor[catalog.replica > 0]))
    if any(role.get(finding.where) == "step" for finding in differing) or 2 * count > several > 4:
        return ("G6", "F1")
    return ("F1", "G6")


def _fqns(state: State, findings: Sequence[Finding]) -> list[str]:
    fqn = dict(zip(state.ckpt.catalog.keys, state.ckpt.fqns, strict=True))
    keys = [key for finding in findings for key in (finding.where, *finding.evidence.get("tensors", ()))]
    return list(dict.fromkeys(fqn[key] or key for key in keys if key in fqn))


# ---- what was checked ----------------------------------------------------------------------------------------------


def _checked(state: State, log: Log, found: Outcome, fired: set[str], deep: bool) -> None:
    catalog = state.ckpt.catalog
    for rule, words in (("N18", "coverage"), ("V01", "commit"), ("V05", "optimizer")):
        if words in log.checked:
            found.checked[rule] = log.checked[words]
    found.checked["N19"] = "names of layers"
    if not {"V01", "N18"} & fired:
        files = plural(len(set(catalog.files)), "file")
        words = f"{files} complete, and {plural(catalog.chunks, 'chunk')} without gap or overlap"
        found.cleared.append(Cleared("files", words, ("G4", "G8", "E8")))
    if not deep:
        found.not_checked |= dict.fromkeys(("S11", "S12", "V02", "V03"), "bytes were not read")
        return
    found.checked["S11"] = "pages of files that hold only zeros"
    if "S11" not in fired:
        found.cleared.append(Cleared("zero pages", f"none in {plural(len(set(catalog.files)), 'file')}", ("G5",)))
    several = len(np.unique(catalog.tensor[catalog.replica > 0]))
    if not several:
        found.not_checked["S12"] = Inapplicable("no element is stored twice")
    else:
        found.checked["S12"] = log.checked.get("replicas", "")
        if "S12" not in fired:
            words = f"{plural(several, 'tensor')} of several ranks: equal bit for bit"
            found.cleared.append(Cleared("replicas", words, ("F1",)))
    sums = "; ".join(log.checked[name] for name in ("checksums", "digests") if name in log.checked)
    if sums:
        found.checked["V02"] = sums
        if "V02" not in fired and "flips" not in log.not_checked:
            words = f"all match: {sums}; changes before they were computed do not show"
            found.cleared.append(Cleared("stored checksums", words, ("G10", "G4")))
    else:
        found.not_checked["V02"] = log.not_checked.get("flips", "no checksums are stored")
    if "manifest" in log.checked:
        found.checked["V03"] = log.checked["manifest"]
        if "V03" not in fired:
            causes = ("G1", "G2", "G3", "G4", "G5", "G10")
            found.cleared.append(Cleared("manifest", log.checked["manifest"], causes))
            if "live" in log.checked:
                found.cleared.append(Cleared(SAVED, f"{log.checked['live']}, and no byte changed since", causes))
    else:
        found.not_checked["V03"] = log.not_checked.get("manifest", "no manifest is known")
