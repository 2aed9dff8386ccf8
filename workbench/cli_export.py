"""``workbench export``: a checkpoint as files of another format, whole or cut for ranks, with the proof."""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

from workbench.checkpoint import Checkpoint
from workbench.cli_common import note, open_as, print_json, table_width
from workbench.core.jsonsafe import read_own
from workbench.errors import UsageError
from workbench.reshard.export import export as write
from workbench.reshard.layouts.rules_file import read_rules
from workbench.reshard.mesh import Mesh
from workbench.reshard.rules import Rules
from workbench.views import units
from workbench.views.export import export_text
from workbench.views.names import safe
from workbench.views.progress import progress

__all__ = ["AXES", "export"]

#: Axes with an option of their own, as a mesh has them: the outermost first.
AXES = ("pp", "dp", "fsdp", "ep", "tp")


def export(options: argparse.Namespace) -> int:
    """Write, or plan, the target, or load onto a device; 0 when it is there."""
    if (options.dest is None) == (options.to_device is None):
        raise UsageError("export takes either a target, as in `export CKPT DEST`, or --to-device DEVICE")
    ckpt = open_as(options, options.path)
    if options.to_device is not None:
        return _to_device(options, ckpt)
    with progress(f"export {os.path.basename(os.path.normpath(ckpt.path))}") as tick:
        report = write(
            ckpt,
            options.dest,
            options.to,
            select=options.select or None,
            role=options.role,
            rename=_rename(options.rename),
            hf_config=_json_object("--hf-config", options.hf_config),
            dtype=options.dtype,
            lora=options.lora or (),
            unscaled=options.unscaled,
            mesh=_mesh(options),
            rules=_rules(options),
            objects=options.objects,
            max_shard_size=options.max_shard_size,
            overwrite=options.overwrite,
            resume=options.resume,
            verify=options.verify,
            manifest=options.manifest,
            threads=options.threads,
            tick=tick,
            dry_run=options.dry_run,
        )
    if options.json:
        print_json(report.to_dict())
    else:
        print(export_text(report, width=table_width()))
    return 0


def _to_device(options: argparse.Namespace, ckpt: Checkpoint) -> int:
    """Load, and say how fast; the tensors go when the process does."""
    for name in ("rename", "lora", "verify", "dry_run", "resume", "overwrite"):
        if getattr(options, name):
            raise UsageError(f"--{name.replace('_', '-')} is about files; leave it out with --to-device")
    from workbench.reshard.onto_device.lane import measure_peak

    peak = measure_peak(options.to_device) if options.time else None
    with progress(f"load {os.path.basename(os.path.normpath(ckpt.path))}") as tick:
        began = time.perf_counter()
        tensors = ckpt.to_device(
            options.to_device,
            select=options.select or None,
            role=options.role,
            mesh=_mesh(options),
            rank=options.rank,
            rules=_rules(options),
            dtype=options.dtype,
            threads=options.threads,
            tick=tick,
        )
        for one in list(tensors.values())[-1:]:
            one.reshape(-1)[:1].cpu()  # what is queued on the device is done
        seconds = time.perf_counter() - began
    nbytes = sum(one.nbytes for one in tensors.values())
    told = {"device": options.to_device, "tensors": len(tensors), "nbytes": nbytes, "seconds": seconds}
    told |= {} if peak is None else {"gb_per_s": nbytes / seconds / 1e9, "peak_gb_per_s": peak}
    if options.json:
        print_json(told)
        return 0
    what = f"{units.plural(len(tensors), 'tensor')}, {units.nbytes(nbytes)}"
    print(f"{what} on {safe(options.to_device)} in {seconds:.2f} s")
    if peak is not None:
        print(f"  {nbytes / seconds / 1e9:.2f} GB/s; copies from one host buffer reach {peak:.2f} GB/s in this run")
    return 0


def _mesh(options: argparse.Namespace) -> Mesh | None:
    sizes = {axis: getattr(options, axis) for axis in AXES if getattr(options, axis) is not None}
    if options.mesh is not None and sizes:
        raise UsageError(f"--mesh and --{next(iter(sizes))} both say what the mesh is; give one of them")
    if options.mesh is not None:
        return Mesh.parse(options.mesh)
    return Mesh(**sizes) if sizes else None


def _rules(options: argparse.Namespace) -> Rules | None:
    explicit = read_rules(options.rules) if options.rules else ()
    return Rules(explicit, layers=options.layers) if explicit or options.layers else None


def _rename(text: str | None) -> Any:
    """A named renaming, or a JSON object of names in a file."""
    if text is None or not text.endswith(".json"):
        return text
    names = _json_object("--rename", text)
    if not all(isinstance(new, str) for new in names.values()):
        raise UsageError(f"--rename {text!r} is not a JSON object of names: {{'stored name': 'new name'}}")
    if not names:
        note(f"{text!r} renames nothing")
    return names


def _json_object(option: str, path: str | None) -> Any:
    if path is None:
        return None
    found = read_own(path, what=f"{option} {path!r}")
    if not isinstance(found, dict):
        raise UsageError(f"{option} {path!r} is not a JSON object")
    return found
