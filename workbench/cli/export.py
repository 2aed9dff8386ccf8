"""``workbench export``: write a checkpoint in another format, whole or sharded, with a manifest as proof."""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

from workbench.checkpoint import Checkpoint
from workbench.cli.common import note, open_as, print_json, print_result, say
from workbench.cli.workers import workers
from workbench.core.jsonsafe import read_own
from workbench.core.mesh.mesh import Mesh
from workbench.core.words import plural
from workbench.errors import UsageError
from workbench.export.export import export as write
from workbench.export.sharding.rules import Rules
from workbench.export.sharding.rules_file import read_rules
from workbench.views import units
from workbench.views.export import export_text
from workbench.views.names import safe
from workbench.views.progress import progress_bar

#: Options without effect on what is loaded onto a device.
ONLY_FILES = (
    *("to", "rename", "hf_config", "lora", "unscaled", "objects", "max_shard_size"),
    *("verify", "dry_run", "resume", "overwrite"),
)
#: Mesh axes that have their own option, outermost first.
AXES = ("pp", "dp", "fsdp", "ep", "tp")


def export(options: argparse.Namespace) -> int:
    """Write or plan the target, or load onto a device; return 0 on success."""
    if (options.dest is None) == (options.to_device is None):
        raise UsageError("export takes either a target, as in `export CKPT DEST`, or --to-device DEVICE")
    if options.to_device is not None and (options.workers is not None or options.dask is not None):
        raise UsageError("--to-device loads into this process: leave out --workers and --dask")
    ckpt = open_as(options, options.path)
    if options.to_device is not None:
        return _to_device(options, ckpt)
    if options.rank is not None or options.time:
        raise UsageError(f"--{'time' if options.rank is None else 'rank'} is for --to-device; leave it out")
    if str(options.dest).startswith("memory:"):
        raise UsageError("memory:// is the memory of this process, which ends with the command; name a path or a store")
    title = f"export {os.path.basename(os.path.normpath(ckpt.path))}"
    with workers(options) as executor, progress_bar(title) as progress:
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
            progress=progress,
            dry_run=options.dry_run,
            executor=executor,
        )
    print_result(options, report, export_text)
    return 0


def _to_device(options: argparse.Namespace, ckpt: Checkpoint) -> int:
    """Load onto a device and print the speed; the tensors are freed when the process exits."""
    for name in ONLY_FILES:
        if getattr(options, name):
            raise UsageError(f"--{name.replace('_', '-')} applies to files; leave it out with --to-device")
    from workbench.load.onto_device.lane import measure_peak

    peak = measure_peak(options.to_device) if options.time else None
    with progress_bar(f"load {os.path.basename(os.path.normpath(ckpt.path))}") as progress:
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
            progress=progress,
        )
        for one in list(tensors.values())[-1:]:
            one.reshape(-1)[:1].cpu()  # wait for everything queued on the device
        seconds = time.perf_counter() - began
    nbytes = sum(one.nbytes for one in tensors.values())
    result = {"device": options.to_device, "tensors": len(tensors), "nbytes": nbytes, "seconds": seconds}
    result |= {} if peak is None else {"gb_per_s": nbytes / seconds / 1e9, "peak_gb_per_s": peak}
    if options.json:
        print_json(result)
        return 0
    what = f"{plural(len(tensors), 'tensor')}, {units.nbytes(nbytes)}"
    say(f"{what} on {safe(options.to_device)} in {seconds:.2f} s")
    if peak is not None:
        say(f"  {nbytes / seconds / 1e9:.2f} GB/s; copies from one host buffer reach {peak:.2f} GB/s in this run")
    return 0


def _mesh(options: argparse.Namespace) -> Mesh | None:
    sizes = {axis: getattr(options, axis) for axis in AXES if getattr(options, axis) is not None}
    if options.mesh is not None and sizes:
        raise UsageError(f"--mesh and --{next(iter(sizes))} both define the mesh; use only one")
    if options.mesh is not None:
        return Mesh.parse(options.mesh)
    return Mesh(**sizes) if sizes else None


def _rules(options: argparse.Namespace) -> Rules | None:
    explicit = read_rules(options.rules) if options.rules else ()
    return Rules(explicit, layers=options.layers) if explicit or options.layers else None


def _rename(text: str | None) -> Any:
    """Return a predefined renaming by name, or a JSON file's object of names."""
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
