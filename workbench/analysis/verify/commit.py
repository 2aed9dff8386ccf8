"""Whether the save was finished, and what the run says of it.

::

    runs/pretrain/latest_checkpointed_iteration.txt     "4000"   the step that a resume would take
    runs/pretrain/iter_0004000/.metadata, metadata.json          written last: the save is whole
"""

from __future__ import annotations

import os

from workbench import completeness, runs
from workbench.analysis.verify.log import Subject
from workbench.core.place import Place
from workbench.errors import WorkbenchError

__all__ = ["check_commit"]


def check_commit(subject: Subject) -> None:
    """The format's commit marker, and the tracker of the run that the checkpoint is part of."""
    log = subject.log
    try:
        why = completeness.missing(subject.place, subject.catalog.format)
    except WorkbenchError as error:
        why = str(error)
    if why:
        log.add(
            "commit.incomplete",
            "error",
            subject.place.name,
            why,
            "the save was interrupted, or files were lost: restore them, or use another step",
        )
    if isinstance(told := subject.catalog.meta.get("incomplete"), str):
        log.add("commit.incomplete", "error", subject.place.name, told, "restore the files of the ranks named")
    _partner(subject)
    log.checked["commit"] = "the marker that a finished save leaves, and the run's tracker beside the folder"
    _tracker(subject)


def _partner(subject: Subject) -> None:
    """Hugging Face's Trainer saves scheduler and optimizer together, or neither."""
    names = {*subject.place.files, *subject.place.folders}
    states = ("optimizer", "pytorch_model_fsdp", "global_step")
    if (
        subject.catalog.format == "hf_trainer"
        and "scheduler.pt" in names
        and not any(name.startswith(states) for name in names)
    ):
        subject.log.add(
            "commit.partner",
            "warn",
            "optimizer.pt",
            "is absent, though 'scheduler.pt' is there, which a save writes beside it",
            "the optimizer's state was lost: a resume would start it from zero",
        )


def _tracker(subject: Subject) -> None:
    root = os.path.dirname(os.path.join(subject.place.root, subject.place.file or ""))
    parent = os.path.dirname(root) if subject.place.file is None else root
    try:
        above = Place(parent)
        for tracker in runs.TRACKERS:
            if tracker not in above.files or above.files[tracker].size > runs.TRACKER_LIMIT:
                continue
            text = above.read(tracker).decode("utf-8", "replace").strip()
            there = [*above.folders, *above.files]
            number = int(text) if text.isdecimal() and len(text) < 19 else None
            if (
                text != "release"
                and text not in there
                and not any(runs.step_of(n) == number is not None for n in there)
            ):
                subject.log.add(
                    "commit.tracker",
                    "warn",
                    f"../{tracker}",
                    f"names {text[:80]!r}, which is not beside it",
                    "a trainer that resumes will look for it: restore that step or correct the tracker",
                    names=text[:80],
                )
    except WorkbenchError:  # no permission to list the folder above: nothing to say about it
        return
