"""The command-line parser: arguments and help of every command, without their implementation.

The documentation prints this help. A command names the module that runs it, ``workbench.cli.NAME``; the function in
that module has the command's name.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, NoReturn

import workbench
from workbench.cli.common import tell
from workbench.core.near import did_you_mean
from workbench.views.names import safe

USAGE = 64
CHECKS = ("verify", "deep", "doctor")  #: of ``workbench.analysis.watch``, which takes long to import


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands (the documentation prints its help)."""
    top = _Parser(
        prog="workbench",
        description="See, slice and check checkpoints without loading them.",
        epilog="Exit codes: 0 done, 1 warnings or differences, 2 errors found, 3 cannot open or read, 64 wrong usage.",
        parents=[_common(top=True)],
    )
    top.add_argument("--version", action="version", version=f"workbench {workbench.__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Command)

    _command(commands, "formats", "list", "list the formats that can be read")

    ls = _command(
        commands, "ls", "list", "list the tensors of a checkpoint by module, or the checkpoints under a folder"
    )
    ls.add_argument("path", help="a checkpoint, or a folder that contains several")
    _pattern(ls)
    ls.add_argument("--flat", action="store_true", help="one line per tensor instead of a tree")
    _role(ls)
    ls.add_argument("--depth", type=_positive, help="levels of the tree (default: all)")

    show = _command(commands, "show", "show", "show a tensor or a slice of it: distribution, chunks, values")
    show.add_argument("path", help="a checkpoint")
    show.add_argument("key", metavar="KEY[SLICE]", help="stored name, as in 'model.w' or 'model.w[2:9, :, -1]'")
    show.add_argument(
        "--exact", action="store_true", help="compute statistics over all elements, even of large tensors"
    )
    show.add_argument(
        "--limit", type=_positive, default=1000, help="with --json: maximum number of values to print (default: 1000)"
    )

    objects = _command(commands, "objects", "show", "show non-tensor state, such as step, arguments and schedulers")
    objects.add_argument("path", help="a checkpoint")
    objects.add_argument("name", nargs="?", help="one object, or all objects whose names start with NAME and a dot")

    stats = _command(commands, "stats", "stats", "compute range, mean, spread and unusual values of every tensor")
    stats.add_argument("path", help="a checkpoint")
    _pattern(stats)
    stats.add_argument(
        "--by",
        choices=("tensor", "shard", "module"),
        default="tensor",
        help="what each row describes; the statistics of a module are those of its float tensors",
    )
    stats.add_argument("--quantiles", action="store_true", help="also quantiles, distinct values and entropy")
    _role(stats)
    stats.add_argument("--sort", metavar="COLUMN", help="sort by this column, largest first (default: stored order)")
    _workers(stats, threads=True, parts=True)

    verify = _command(commands, "verify", "verify", "check that a checkpoint is intact and consistent")
    verify.add_argument("path", help="a checkpoint")
    verify.add_argument(
        "--deep", action="store_true", help="read every byte: checksums, values, replicas, master weights"
    )
    verify.add_argument("--manifest", metavar="FILE", help="compare with a manifest (see workbench manifest)")
    _workers(verify, threads=True, parts=True)

    seal = _command(commands, "seal", "seal", "verify a finished checkpoint, and write its manifest if it is intact")
    seal.add_argument("path", help="a checkpoint")
    seal.add_argument("--quick", action="store_true", help="check the structure only, not every byte")
    seal.add_argument("--beside", action="store_true", help="write the manifest next to the checkpoint, not inside")
    _workers(seal, threads=True)

    manifest = _command(commands, "manifest", "manifest", "record digests of every byte, and check them later")
    manifest.add_argument("action", choices=("write", "check", "diff"), help="what to do")
    manifest.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="write: a checkpoint; check: a checkpoint and, if stored elsewhere, its manifest; diff: two manifests",
    )
    manifest.add_argument("--output", metavar="FILE", help="file to write (default: NAME.manifest.json next to NAME)")
    manifest.add_argument("--inside", action="store_true", help="write the manifest into the checkpoint's folder")
    _workers(manifest, threads=True, parts=True)

    diff = _command(commands, "diff", "diff", "compare two checkpoints, bit for bit")
    diff.add_argument("a", help="a checkpoint")
    diff.add_argument("b", help="another checkpoint, of any format and sharding")
    _pattern(diff)
    _role(diff)
    diff.add_argument("--no-values", action="store_true", help="compare only names, shapes, types and objects")
    diff.add_argument(
        "--evidence",
        choices=("auto", "none", "trust"),
        default="auto",
        help="stored checksums and manifests: use with --no-values (auto), never (none), or instead of reading tensors "
        "that they show to be equal (trust)",
    )
    diff.add_argument("--tensor", metavar="KEY", dest="detail", help="one tensor in detail: histograms and positions")
    diff.add_argument(
        "--replicas", type=int, nargs=2, metavar=("I", "J"), help="compare replica I of A with replica J of B"
    )
    diff.add_argument("--all", action="store_true", help="list every tensor that differs, not only the first ones")
    _workers(diff, threads=True)

    doctor = _command(
        commands, "doctor", "doctor", "find out why the loss jumped after a resume: causes, evidence, remedy"
    )
    doctor.add_argument(
        "before",
        help="the checkpoint that the run resumed from, or a run's folder, whose steps are then chosen automatically",
    )
    doctor.add_argument(
        "after", nargs="?", help="a checkpoint of the resumed run, as soon after the resume as possible"
    )
    doctor.add_argument(
        "--logs",
        metavar="PATH",
        action="append",
        help="with a run's folder: a log of the run, or a folder of logs; repeatable (default: logs in the run's "
        "folder, or above it)",
    )
    doctor.add_argument("--echo", metavar="PATH", help="the state saved again right after the load, before any update")
    doctor.add_argument(
        "--betas", type=float, nargs=2, metavar=("B1", "B2"), help="AdamW's betas, if no file stores them"
    )
    doctor.add_argument("--lr", type=float, help="learning rate, if no file stores it")
    doctor.add_argument("--weight-decay", type=float, metavar="WD", help="weight decay, if no file stores it")
    doctor.add_argument(
        "--shallow", action="store_true", help="compare only names, counters and arguments; read no values"
    )
    doctor.add_argument("--html", metavar="FILE", help="also write a page with figures; it works offline")
    doctor.add_argument("--all", action="store_true", help="print everything, not only the first screen")
    _workers(doctor, threads=True)

    report = _command(
        commands, "report", "report", "write a run, a checkpoint, or the difference of two as one HTML file"
    )
    report.add_argument("paths", nargs="+", metavar="PATH", help="a run's folder, a checkpoint, or two checkpoints")
    report.add_argument("--output", "-o", metavar="FILE", help="HTML file to write; it needs no network")
    report.add_argument(
        "--figure", metavar="FILE", help="write a run's curves as PNG, SVG or PDF, depending on the file name"
    )
    report.add_argument("--logs", metavar="PATH", help="a log of the run, or a folder of logs")
    report.add_argument("--deep", action="store_true", help="read every byte of every checkpoint, whatever its size")
    _threads(report)

    layout = _command(
        commands,
        "layout",
        "layout",
        "show what each rank stores, inferred from the stored chunks, and whether it fits given GPUs",
    )
    layout.add_argument("path", help="a checkpoint")
    _pattern(layout)
    _role(layout)
    layout.add_argument("--tensor", metavar="KEY", help="one tensor: its placement and where each chunk is")
    layout.add_argument(
        "--rank", metavar="N", help="one rank, or the label of a holder: coordinates, peers, what it stores"
    )
    layout.add_argument(
        "--phases", action="store_true", help="how long each phase of the save took on each rank, from the manifest"
    )
    layout.add_argument("--all", action="store_true", help="list every rank and chunk, not only the first ones")
    layout.add_argument(
        "--fit",
        nargs=2,
        metavar=("GPUS", "GB"),
        help="find the smallest layout that fits this many GPUs with this much memory",
    )
    for axis in ("tp", "pp", "dp", "ep"):
        layout.add_argument(f"--{axis}", type=_positive, metavar="N", help=f"with --fit: size of {axis} (default: any)")
    layout.add_argument(
        "--stage",
        type=int,
        choices=range(4),
        help="with --fit: sharding stage: 0 none, 1 optimizer state, 2 also gradients, 3 also weights",
    )
    layout.add_argument(
        "--weights", default="stored", metavar="TYPE", help="with --fit: bf16, fp32, fp8 … (default: as stored)"
    )
    layout.add_argument(
        "--grads",
        default="weights",
        metavar="TYPE",
        help="with --fit: type of the gradients (default: that of the weights)",
    )
    layout.add_argument(
        "--master",
        default="auto",
        metavar="TYPE",
        help="with --fit: type of the master weights (default: fp32 if the weights are narrower)",
    )
    layout.add_argument(
        "--moments", default="fp32", metavar="TYPE", help="with --fit: type of each of the two moments (default: fp32)"
    )
    layout.add_argument("--inference", action="store_true", help="with --fit: count only the weights")
    layout.add_argument(
        "--reserve",
        type=float,
        default=0.0,
        metavar="GB",
        help="with --fit: memory of each GPU reserved for everything else",
    )

    export = _command(commands, "export", "export", "write a checkpoint in another format or sharding")
    export.add_argument("path", help="a checkpoint")
    export.add_argument(
        "dest", nargs="?", help="a folder that does not exist yet, or a file: NAME.safetensors, NAME.pt"
    )
    export.add_argument(
        "--to",
        metavar="FORMAT",
        help="format to write (default: that of the target's name, as in NAME.pt; otherwise safetensors)",
    )
    export.add_argument(
        "--select",
        action="append",
        metavar="PATTERN",
        help="only tensors whose name contains a match of this regular expression; repeatable",
    )
    export.add_argument(
        "--role", default="model", help="only this role (param, exp_avg …) or group: model (default), optimizer, all"
    )
    export.add_argument("--rename", metavar="NAMES", help="hf, fqn, or a JSON file {stored name: new name}")
    export.add_argument(
        "--hf-config",
        metavar="FILE",
        help="with --rename hf: a config.json with facts that the checkpoint does not store",
    )
    export.add_argument(
        "--dtype", help="cast to bf16, fp16 or fp32; or quantise the weights of linear layers: fp8, fp8-tensor"
    )
    export.add_argument(
        "--lora", action="append", metavar="ADAPTER", help="merge this PEFT adapter into the weights; repeatable"
    )
    export.add_argument(
        "--unscaled", action="store_true", help="with --dtype: take the codes of FP8 weights without a scale as values"
    )
    export.add_argument("--mesh", help="shard for the ranks of this mesh, outermost axis first: dp=2,tp=4")
    for axis in ("pp", "dp", "fsdp", "ep", "tp"):
        export.add_argument(f"--{axis}", type=_positive, metavar="N", help=f"size of the mesh's axis {axis}")
    export.add_argument("--rules", metavar="FILE", help="JSON file with custom placements (docs/reshard.md)")
    export.add_argument(
        "--layers",
        type=_layers,
        metavar="N,N",
        help="number of layers of each pipeline stage (default: evenly divided)",
    )
    export.add_argument(
        "--objects",
        action=argparse.BooleanOptionalAction,
        help="also write non-tensor state: step, schedulers … (default: with --role all)",
    )
    export.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        help="without a mesh: maximum size of the safetensors files in a folder (default: 5GB)",
    )
    export.add_argument("--overwrite", action="store_true", help="replace an existing checkpoint of that name")
    export.add_argument("--resume", action="store_true", help="resume an interrupted run of the same export")
    export.add_argument("--verify", action="store_true", help="read the target back before it becomes visible")
    export.add_argument(
        "--manifest", action=argparse.BooleanOptionalAction, default=True, help="write a manifest into the folder"
    )
    export.add_argument("--dry-run", action="store_true", help="only print what would be read and written")
    _workers(export, threads=True)
    export.add_argument(
        "--to-device", metavar="DEVICE", help="load onto a device (cuda:0, cpu …) instead of writing files"
    )
    export.add_argument("--rank", type=_number, help="with --to-device and a mesh: rank whose tensors are loaded")
    export.add_argument(
        "--time", action="store_true", help="with --to-device: print GB/s, and the peak rate of copies to the device"
    )

    merge = _command(commands, "merge", "merge", "combine the parts of a command that ran with --part")
    merge.add_argument("parts", nargs="+", metavar="PART", help="all part files")
    merge.add_argument(
        "--checkpoint",
        metavar="PATH",
        help="path or URL of the checkpoint, if the one in the parts cannot be opened: they contain no passwords or "
        "signatures",
    )
    _threads(merge)

    watch = _command(
        commands, "watch", "watch", "report new steps, spikes, resumes and findings of a run as they appear"
    )
    watch.add_argument("root", help="folder or URL of one or more runs")
    watch.add_argument(
        "--check",
        action="append",
        choices=CHECKS,
        help="check each step: its structure (verify, the default), every byte (deep), or what has changed since the "
        "step before it (doctor); repeatable",
    )
    watch.add_argument(
        "--logs",
        metavar="PATH",
        action="append",
        help="a log of the run, or a folder of logs; repeatable (default: logs in the run's folder, or above it)",
    )
    watch.add_argument(
        "--interval",
        type=_seconds,
        metavar="S",
        help="seconds between two polls (default: 2, up to 30 while nothing changes; for URLs: 30, up to 300)",
    )
    watch.add_argument("--once", action="store_true", help="report the current state, then exit")
    watch.add_argument("--from-now", action="store_true", help="report only what is saved and logged from now on")
    watch.add_argument(
        "--on-finding",
        metavar="CMD",
        help="run this command for each warning and error; it gets the event as JSON on stdin, and in WORKBENCH_* "
        "variables",
    )
    watch.add_argument("--webhook", metavar="URL", help="POST each warning and error to this URL, as JSON")
    watch.add_argument(
        "--until-steps", type=_positive, metavar="N", help="exit when N steps have been reported and checked"
    )
    watch.add_argument("--for", type=_seconds, metavar="SECONDS", dest="duration", help="exit after this time")
    _threads(watch)

    serve = _command(commands, "serve", "serve", "serve the dashboard for a browser")
    serve.add_argument("root", help="folder or URL that contains checkpoints; nothing outside it can be opened")
    serve.add_argument("--port", type=_port, default=5006, help="TCP port (default: 5006)")
    serve.add_argument("--address", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    _workers(serve)
    serve.add_argument(
        "--watch",
        type=_checks,
        default=(),
        metavar="CHECKS",
        help="check each new step in the background: verify, deep, doctor, or several, separated by commas",
    )
    serve.add_argument("--show", action=argparse.BooleanOptionalAction, default=False, help="open a browser")
    serve.add_argument(
        "--allow-export",
        nargs="?",
        const=".",
        metavar="DIR",
        help="allow exports, into this folder inside ROOT (default: anywhere in ROOT)",
    )
    serve.add_argument("--auth", metavar="HOW", help="require a login: basic, or github, google … (docs/serving.md)")
    serve.add_argument("--user", default="workbench", help="with --auth basic: user name (default: workbench)")
    serve.add_argument(
        "--password-file",
        metavar="FILE",
        help="with --auth basic: file with the password (default: $WORKBENCH_PASSWORD)",
    )
    serve.add_argument(
        "--allow-user",
        action="append",
        default=[],
        metavar="NAME",
        help="with another --auth: user who may log in, or '*' for everyone; repeatable",
    )
    serve.add_argument(
        "--insecure", action="store_true", help="allow an address that others can reach without a password"
    )
    serve.add_argument(
        "--prefix", default="", metavar="PATH", help="URL path at which a reverse proxy serves the dashboard"
    )
    serve.add_argument(
        "--allow-websocket-origin",
        action="append",
        default=[],
        metavar="HOST[:PORT]",
        help="address of the dashboard as the browser sees it; repeatable",
    )
    serve.add_argument("--certificate", metavar="FILE", help="PEM file; with --key, serve over TLS")
    serve.add_argument("--key", metavar="FILE", help="PEM file with the private key of the certificate")
    return top


class _Parser(argparse.ArgumentParser):
    def __init__(self, **how: Any) -> None:
        super().__init__(**how, allow_abbrev=False)  # `--part`, which only some commands have, is not `--partial`

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is sys.stdout:
            file.write(message)  # help that cannot be written is an error, as for any result; argparse would ignore it
        elif message:
            tell(message.rstrip("\n"))

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {safe(message)}; see {self.prog} --help\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            known = [str(choice) for choice in action.choices or ()]
            raise argparse.ArgumentError(action, error.message + did_you_mean(value, known)) from None


class _Command(_Parser):
    """A command whose options may come between its arguments: ``ls PATH --flat PATTERN``."""

    _mixing = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._mixing:  # Python 3.11's intermixed parsing calls this again
            return super().parse_known_args(args, namespace)
        self._mixing = True
        try:
            found, rest = self.parse_known_intermixed_args(args, namespace)
        finally:
            self._mixing = False
        for one in rest:
            if one.startswith("-"):
                name = one.partition("=")[0]
                self.error(f"there is no option {name}{did_you_mean(name, list(self._option_string_actions))}")
        return found, rest


def _common(*, top: bool = False) -> argparse.ArgumentParser:
    """Create the options that may come before or after the command; those after it must not reset those before it."""
    common = argparse.ArgumentParser(add_help=False)
    group = common.add_argument_group("common options")

    def add(name: str, default: Any, **how: Any) -> None:
        group.add_argument(name, default=default if top else argparse.SUPPRESS, **how)

    add("--json", False, action="store_true", help="print one JSON document")
    add("--format", None, metavar="NAME", help="read as this format instead of detecting it")
    add("--partial", False, action="store_true", help="open the checkpoint even if files are missing or truncated")
    add("--no-cache", False, action="store_true", help="do not read or write the cache of large catalogs")
    add(
        "--storage-option",
        None,
        action="append",
        type=_option,
        metavar="KEY=VALUE",
        help="for URLs: endpoint=…, region=…, skip_signature=true; repeatable. Keep secrets in the environment: other "
        "users of this machine can see a command's arguments",
    )
    add(
        "--cache-dir",
        None,
        metavar="DIR",
        help="for URLs: cache fetched data in this folder, up to 16 GiB",
    )
    return common


def _command(commands: Any, name: str, module: str, words: str) -> argparse.ArgumentParser:
    made: argparse.ArgumentParser = commands.add_parser(
        name, help=words, description=words[0].upper() + words[1:] + ".", parents=[_common()]
    )
    made.set_defaults(run=(f"workbench.cli.{module}", name))
    return made


def _pattern(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "pattern", nargs="*", default=(), help="regular expressions; only tensors whose name contains a match"
    )


def _role(command: argparse.ArgumentParser) -> None:
    command.add_argument("--role", help="only tensors of this role (param, exp_avg …) or group (model, optimizer)")


def _threads(command: argparse.ArgumentParser) -> None:
    command.add_argument("--threads", type=_positive, help="number of threads (default: number of cores, up to 8)")


def _workers(command: argparse.ArgumentParser, *, threads: bool = False, parts: bool = False) -> None:
    """Add the options for where a command that reads every byte does the work."""
    if threads:
        _threads(command)
    command.add_argument("--workers", type=_positive, metavar="N", help="read with this many processes")
    command.add_argument("--dask", metavar="ADDRESS", help="read on the workers of this Dask scheduler")
    if parts:
        command.add_argument(
            "--part", type=_part, metavar="I/N", help="run only part I of N; `workbench merge` combines them"
        )
        command.add_argument(
            "--part-file", metavar="FILE", help="with --part: file to write (default: NAME.COMMAND.I-of-N.part)"
        )


def _part(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    given = [int(one) if one.isascii() and one.isdecimal() and len(one) < 7 else 0 for one in (number, count)]
    if not 1 <= given[0] <= given[1] <= 100_000:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a part: write 3/8 for the third of eight; parts are numbered from 1 to at most 100,000"
        )
    return given[0], given[1]


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < int(text) < 1 << 62):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return value


def _checks(text: str) -> tuple[str, ...]:
    for name in (names := tuple(text.split(","))):
        if name not in CHECKS:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(CHECKS)}{did_you_mean(name, CHECKS)}")
    return names


def _option(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError("expected KEY=VALUE")  # the text may be a secret
    if value in ("true", "false", "null") or value.startswith("{"):
        try:
            return key, json.loads(value)
        except ValueError:
            raise argparse.ArgumentTypeError(f"the value of {key!r} is not valid JSON") from None
    return key, value


def _layers(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))


def _number(text: str) -> int:
    return 0 if text == "0" else _positive(text)


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) < 1 << 16):
        raise argparse.ArgumentTypeError(f"{text!r} is not a TCP port")
    return int(text)
