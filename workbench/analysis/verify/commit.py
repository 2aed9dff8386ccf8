"""Check that the save was finished, and that the run's tracker agrees.

::

    runs/pretrain/latest_checkpointed_iteration.txt     "4000"   the step that a resume would take
    runs/pretrain/iter_0004000/.metadata, metadata.json          written last: the save is complete
"""

from __future__ import annotations

import os

from workbench import formats, runs
from workbench.analysis.verify.log import Examined
from workbench.core.words import without_partial
from workbench.errors import WorkbenchError, quoted
from workbench.names.steps import step_of

#: What a reader found to be lost: the rule that reports it, and what to do.
LOST = {
    "incomplete": ("commit.incomplete", "restore the files of the named ranks"),
    "absent": ("open.missing", "restore the named file, or use another checkpoint"),
    "contradiction": ("open.corrupt", "correct the index if another file holds the tensor, or restore the files"),
}


def check_commit(subject: Examined) -> None:
    """Check the format's commit marker, and the tracker of the checkpoint's run."""
    log = subject.log
    try:
        why = formats.missing(subject.place, subject.catalog.format)
    except WorkbenchError as error:
        why = str(error)
    lost_files = [found for found in log.found if found.rule.startswith("files.") and found.severity == "error"]
    of_index = {"absent", "contradiction"} & subject.catalog.meta.keys()  # reported below
    if why and not of_index and not any(repr(os.path.basename(found.where)) in why for found in lost_files):
        log.add(
            "commit.incomplete",
            "error",
            subject.place.name,
            why,
            "the save was interrupted, or files were lost: restore them, or use another step",
        )
    for fact, (rule, remedy) in LOST.items():
        if isinstance(lost := subject.catalog.meta.get(fact), str):
            log.add(rule, "error", subject.place.name, without_partial(lost), remedy)
    _partner(subject)
    tracker = _tracker(subject)
    log.checked["commit"] = "whether the save was finished, as far as its format marks that"
    if tracker:
        log.checked["commit"] += f"; the step that the run's tracker, {tracker!r}, names"


def _partner(subject: Examined) -> None:
    """Check that files which are saved together both exist (Hugging Face's Trainer: scheduler and optimizer)."""
    together = formats.record(subject.catalog.format).saved_together
    names = {*subject.place.files, *subject.place.folders}
    if together is None or together[1] not in names or any(name.startswith(together[2]) for name in names):
        return
    subject.log.add(
        "commit.partner",
        "warn",
        together[0],
        f"is absent, but {together[1]!r} exists, which is always saved with it",
        "the optimizer state was lost: a resume would start from zero",
    )


def _tracker(subject: Examined) -> str:
    """Check the run's tracker; return its name, or "" if there is none."""
    found = ""
    try:
        above = subject.place.above
        if above is None:
            return ""
        for tracker in runs.TRACKERS:
            if tracker not in above.files or above.files[tracker].size > runs.TRACKER_LIMIT:
                continue
            found = tracker
            text = above.read(tracker).decode("utf-8", "replace").strip()
            names = [*above.folders, *above.files]
            number = int(text) if text.isdecimal() and len(text) < 19 else None
            if text != "release" and text not in names and not any(step_of(n) == number is not None for n in names):
                subject.log.add(
                    "commit.tracker",
                    "warn",
                    f"../{tracker}",
                    f"names {quoted(text)}, which is not in the same folder",
                    "a resuming trainer will look for it: restore that step or correct the tracker",
                    names=text[:80],
                )
    except WorkbenchError:  # no permission to list the parent folder: nothing to report
        pass
    return found
