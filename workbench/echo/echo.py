"""The echo: a trainer's state right after its load, recorded or compared before the first update.

::

    load ──▶ echo(model, optimizer, path, against=CKPT) ──▶ first update
               │ names, 16 bytes per block of 4 MiB, objects     the training is not modified
               ├──▶ path: a DCP checkpoint (payload=True), or one JSON file of fingerprints
               └──▶ what differs from CKPT, bit for bit
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from workbench.analysis.echo_file import SMALL, Echo, EchoTensor, is_echo, read_echo, write_echo
from workbench.checkpoint import Checkpoint, open
from workbench.core.ranks import Ranks
from workbench.core.remote.url import local_only
from workbench.core.scan import Progress, part_of
from workbench.core.words import plural
from workbench.doctor.facts.evidence import State, align
from workbench.doctor.facts.gather import gather
from workbench.doctor.rules.prints import compare_prints, echo_state
from workbench.echo.hashing import fingerprints
from workbench.echo.listing import Listing, gather_alike, list_all
from workbench.echo.live import Live, collect, leaves
from workbench.echo.report import EchoReport, differences, facts, own
from workbench.echo.save import save
from workbench.errors import UsageError
from workbench.names.roles import resolve

NOW = "%Y-%m-%dT%H:%M:%SZ"


def echo(
    model: Any,
    optimizer: Any = None,
    path: str | os.PathLike[str] | None = None,
    *,
    scheduler: Any = None,
    dataloader: Any = None,
    step: int | None = None,
    extra: Mapping[str, Any] | None = None,
    payload: bool = True,
    against: Checkpoint | str | os.PathLike[str] | None = None,
    process_group: Any = None,
    progress: Progress | None = None,
) -> EchoReport:
    """Record a trainer's state right after its load, and compare it with the loaded checkpoint.

    Call it between the load and the first update; in a distributed job, on every rank. It changes nothing: it takes no
    step, modifies no gradient, parameter or generator, and does not create missing optimizer state.

    Args:
        model: a module (plain, DDP, compiled, FSDP2), a list of them (stages of a pipeline), or a state dict.
        optimizer: a torch optimizer, a wrapper of one, a list of them, or a state dict by names.
        path: where to write the echo, or ``None``; an older echo there is replaced, anything else is refused.
        scheduler, dataloader: objects with ``state_dict()``, or their state as a mapping.
        step: number of updates done, as counted by the trainer.
        extra: anything else that the checkpoint contains: ``{"args": vars(args)}``.
        payload: write the tensors, as a ``torch.distributed.checkpoint`` folder; otherwise one JSON file of
            fingerprints (into ``path`` if that is a folder).
        against: the checkpoint that was loaded, of any format, or an echo made when it was saved. It is read once, with
            the work divided among the ranks, and not read at all if it has a manifest.
        process_group: the ranks that hold the state together; by default all.
        progress: called with the fraction done of what this rank hashes, writes and reads.

    Returns:
        A report, the same on every rank, with a finding for each difference between the trainer and what was stored.
        Findings are not raised as errors; call ``report.raise_for_errors()`` for that.

    Raises:
        UsageError: neither ``path`` nor ``against`` is given, ``path`` exists and is not an echo, or the names of the
            model's parameters are unknown.
        OpenError: ``against`` cannot be opened.
    """
    if path is None and against is None:
        raise UsageError("echo has nothing to do: pass a path to write to, or the loaded checkpoint as against=")
    ranks = Ranks(process_group)
    with _untouched():
        with ranks.together():
            live = collect(model, optimizer, scheduler, dataloader, step, extra)
            tensors, objects = leaves(live.state)
            before = None if against is None else _loaded_state(against)
        listing = _listed(tensors, ranks)
        hash_share, write_share, read_share = _shares(listing, before, payload and path is not None, ranks)
        hashing = part_of(progress, 0.0, hash_share)
        found = _capture(live, tensors, listing, objects, ranks, payload and path is not None, hashing)
        if path is not None:
            name = os.path.abspath(os.path.expanduser(local_only(os.fspath(path), "an echo")))
            if payload:
                written = save(live.state, found, name, ranks)
            else:
                with ranks.together():
                    written = write_echo(found, name) if ranks.rank == 0 else name
            found = replace(found, path=gather_alike(written, ranks)[0])
        reading = part_of(progress, hash_share + write_share, read_share)
        report = _report(found, before, None if path is None else found.path, ranks, reading)
        if progress is not None:
            progress(1.0)
        return report


def compare_echo(
    against: Checkpoint | str | os.PathLike[str], echo: Echo | str | os.PathLike[str], *, threads: int | None = None
) -> EchoReport:
    """Compare a checkpoint (or an older echo) with an echo of fingerprints, without the trainer.

    Raises:
        OpenError: one of them cannot be opened.
    """
    found = echo if isinstance(echo, Echo) else read_echo(echo)
    return _report(found, _loaded_state(against), found.path, None, None, threads)


# ---- taking it -------------------------------------------------------------------------------------------------------


def _listed(tensors: Mapping[tuple[str, ...], Any], ranks: Ranks) -> Listing:
    named = {".".join(path): tensor for path, tensor in tensors.items()}
    with ranks.together():
        if len(named) != len(tensors):
            raise UsageError("two tensors have the same name after their paths are joined by dots; rename one of them")
    return list_all(named, ranks)


def _shares(
    listing: Listing, before: tuple[State, Echo | None] | None, payload: bool, ranks: Ranks
) -> tuple[float, float, float]:
    """Return the shares of hashing, writing and reading of the bytes that this rank moves."""
    held = sum(one.nbytes for one in listing.held.values())
    stored = 0 if before is None or before[1] is not None else int(before[0].ckpt.catalog.tensor_nbytes.sum())
    hashed, written, read = max(held, 1), held * payload, stored / ranks.size
    total = hashed + written + read
    return hashed / total, written / total, read / total


def _capture(
    live: Live,
    tensors: Mapping[tuple[str, ...], Any],
    listing: Listing,
    objects: dict[str, Any],
    ranks: Ranks,
    payload: bool,
    progress: Progress | None,
) -> Echo:
    import torch

    paths = {".".join(path): path for path in tensors}
    contents = fingerprints(listing, ranks, progress)
    small = {}
    for name, one in listing.held.items():
        if listing.rows[name].mesh is None and one.nbytes <= SMALL:
            small[name] = one.local.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    for rank_paths, rank_small in reversed(gather_alike((paths, small), ranks)):
        paths, small = rank_paths | paths, small | rank_small
    keys = list(listing.every)
    fqns, roles = resolve(keys, {"paths": paths})
    made = {
        key: EchoTensor(
            row.dtype,
            row.shape,
            fqn,
            role,
            contents[key].hex if key in contents else None,
            listing.why.get(key, ""),
            row.tied,
            small.get(row.tied or key),
        )
        for key, fqn, role, row in zip(keys, fqns, roles, listing.every.values(), strict=True)
    }
    groups, counts = _merged(live, objects, ranks)
    if groups is not None:
        objects.setdefault("optimizer", {})["param_groups"] = groups
        live.state["optimizer"]["param_groups"] = groups
    copies = {key: one.copies for key, one in contents.items() if one.copies}
    now = datetime.now(UTC).strftime(NOW)
    return Echo(None, now, ranks.size, payload, made, objects, counts, copies)


def _merged(live: Live, objects: Mapping[str, Any], ranks: Ranks) -> tuple[list[Any] | None, dict[str, int]]:
    """Merge the param groups and counts of all ranks; pipeline stages have parameters of their own."""
    optimizer = objects.get("optimizer")
    groups = optimizer.get("param_groups") if isinstance(optimizer, dict) else None
    gathered = gather_alike((groups, live.trained, live.with_state, live.strangers), ranks)
    made: dict[str, dict[str, Any]] = {}
    for rank, (theirs, *_) in enumerate(gathered):
        if not isinstance(theirs, list) or any(theirs is other[0] for other in gathered[:rank]):
            continue
        for number, group in enumerate(theirs):
            settings = {key: value for key, value in group.items() if key != "params"}
            own = made.setdefault(f"{number} {settings!r}", {**settings, "params": []})
            own["params"] += [name for name in group.get("params") or () if name not in own["params"]]
    if all(one[1] is None for one in gathered):
        return list(made.values()) or None, {}
    trained, held, strangers = ({name for one in gathered for name in one[at] or ()} for at in (1, 2, 3))
    counts = {"trained": len(trained), "with_state": len(held & trained), "strangers": len(strangers)}
    return list(made.values()) or None, counts


# ---- comparing it ----------------------------------------------------------------------------------------------------


def _loaded_state(against: Checkpoint | str | os.PathLike[str]) -> tuple[State, Echo | None]:
    """Return the checkpoint that was loaded, and its fingerprints if it is an echo itself."""
    if not isinstance(against, Checkpoint):
        if is_echo(against):
            known = read_echo(against)
            return echo_state(known), known
        against = open(against)
    return State(against, gather(against)), None


def _report(
    found: Echo,
    given: tuple[State, Echo | None] | None,
    path: str | None,
    ranks: Ranks | None,
    progress: Progress | None,
    threads: int | None = None,
) -> EchoReport:
    before, known = given if given is not None else (None, None)
    findings = own(found, before)
    checked: dict[str, str] = {}
    not_checked: dict[str, str] = {}
    unfingerprinted = {key: one.why for key, one in found.tensors.items() if one.fingerprint is None}
    seen = len(found.tensors) - len(unfingerprinted)
    checked["echo"] = f"{seen:,} of {plural(len(found.tensors), 'tensor')} of {plural(found.world_size, 'rank')}"
    not_checked |= {f"tensor {key!r}": why for key, why in list(unfingerprinted.items())[:20]}
    if before is None:
        not_checked["values"] = "nothing to compare with; pass against=, or run `workbench doctor CHECKPOINT --echo …`"
        return EchoReport.of(path or "echo", findings, checked, not_checked)._about(found, path)
    after = echo_state(found)
    pair = align(before, after)
    subject = before.ckpt.path
    known_fingerprints = (
        None if known is None else {k: t.fingerprint for k, t in known.tensors.items() if t.fingerprint}
    )
    compared = compare_prints(pair, found, known=known_fingerprints, ranks=ranks, threads=threads, progress=progress)
    findings += differences(compared, state=found.counts.get("with_state", 1) > 0)
    source = plural(compared.nbytes, "byte") if compared.nbytes else "no bytes"
    same = len(compared.equal)
    of = same + len(compared.differing)
    checked["values"] = f"{same:,} of {of:,} tensors are equal bit for bit; {source} of the checkpoint were read"
    not_checked |= {f"tensor {key!r}": why for key, why in list(compared.unread.items())[:20]}
    more, facts_checked, facts_unchecked = facts(before, after, pair)
    checked |= facts_checked
    not_checked |= {rule: why for rule, why in facts_unchecked.items() if rule not in facts_checked}
    return EchoReport.of(subject, findings + more, checked, not_checked)._about(found, path)


@contextmanager
def _untouched() -> Iterator[None]:
    """Restore random generators, even if a scheduler's or loader's ``state_dict`` draws numbers."""
    import random

    import numpy as np
    import torch

    kept = torch.get_rng_state(), random.getstate(), np.random.get_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        torch.set_rng_state(kept[0])
        random.setstate(kept[1])
        np.random.set_state(kept[2])
        if devices is not None:
            torch.cuda.set_rng_state_all(devices)
