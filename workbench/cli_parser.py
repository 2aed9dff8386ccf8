"""What the command line takes: every command's arguments and help; nothing of what they do.

The documentation prints this help. A command names the module that runs it, ``workbench.cli_NAME``, and a function of
the command's name in there.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, NoReturn

import workbench
from workbench.cli_common import tell
from workbench.core.near import did_you_mean
from workbench.views.names import safe

__all__ = ["USAGE", "parser"]

USAGE = 64


def parser() -> argparse.ArgumentParser:
    """The parser of all commands (the documentation prints its help)."""
    top = _Parser(
        prog="workbench",
        description="See, slice and check checkpoints without loading them.",
        epilog="Exit codes: 0 done, 1 warnings or differences, 2 errors found, 3 cannot open or read, 64 wrong usage.",
        parents=[_common(top=True)],
    )
    top.add_argument("--version", action="version", version=f"workbench {workbench.__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Command)

    _command(commands, "formats", "list", "the formats that can be read")

    ls = _command(commands, "ls", "list", "the modules and tensors of a checkpoint, or the checkpoints under a folder")
    ls.add_argument("path", help="a checkpoint, or a folder with several")
    ls.add_argument(
        "pattern", nargs="*", default=(), help="regular expressions; tensors whose name matches one of them somewhere"
    )
    ls.add_argument("--flat", action="store_true", help="one line a tensor instead of a tree")
    ls.add_argument("--role", help="only tensors of this role: param, exp_avg, exp_avg_sq, buffer …")
    ls.add_argument("--depth", type=_positive, help="levels of the tree (default: all)")

    show = _command(commands, "show", "show", "a tensor or a part of it: distribution, chunks, values")
    show.add_argument("path", help="a checkpoint")
    show.add_argument("key", metavar="KEY[SLICE]", help="stored name, as in 'model.w' or 'model.w[2:9, :, -1]'")
    show.add_argument("--exact", action="store_true", help="statistics of every element, however many there are")
    show.add_argument("--limit", type=_positive, default=1000, help="with --json: most values printed (default: 1000)")

    objects = _command(commands, "objects", "show", "the state that is no tensor: step, arguments, schedulers …")
    objects.add_argument("path", help="a checkpoint")
    objects.add_argument("name", nargs="?", help="one object, or all whose names begin with NAME and a dot")

    stats = _command(commands, "stats", "stats", "range, moments and odd values of every tensor")
    stats.add_argument("path", help="a checkpoint")
    stats.add_argument(
        "pattern", nargs="*", default=(), help="regular expressions; tensors whose name matches one of them"
    )
    stats.add_argument("--by", choices=("tensor", "shard", "module"), default="tensor", help="what a row is")
    stats.add_argument("--quantiles", action="store_true", help="quantiles, distinct values and entropy as well")
    stats.add_argument("--role", help="only tensors of this role: param, exp_avg, exp_avg_sq, buffer …")
    stats.add_argument("--sort", metavar="COLUMN", help="largest of this column first (default: as stored)")
    stats.add_argument("--threads", type=_positive, help="how many work side by side (default: cores, at most 8)")

    verify = _command(commands, "verify", "verify", "whether a checkpoint is whole and its parts belong together")
    verify.add_argument("path", help="a checkpoint")
    verify.add_argument("--deep", action="store_true", help="read every byte: checksums, values, copies, masters")
    verify.add_argument("--manifest", metavar="FILE", help="compare with what a manifest says (see workbench manifest)")
    verify.add_argument("--threads", type=_positive, help="how many work side by side (default: cores, at most 8)")

    manifest = _command(commands, "manifest", "manifest", "fingerprints of every byte and tensor, to prove later")
    manifest.add_argument("action", choices=("write", "check", "diff"), help="what to do")
    manifest.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="write: a checkpoint; check: a checkpoint and, if elsewhere, its manifest; diff: two manifests",
    )
    manifest.add_argument("--output", metavar="FILE", help="write it here (default: NAME.manifest.json beside NAME)")
    manifest.add_argument("--inside", action="store_true", help="keep it in the checkpoint's folder")
    manifest.add_argument("--threads", type=_positive, help="how many work side by side (default: cores, at most 8)")

    diff = _command(commands, "diff", "diff", "what differs between two checkpoints, bit for bit")
    diff.add_argument("a", help="a checkpoint")
    diff.add_argument("b", help="another, of any format and sharding")
    diff.add_argument(
        "pattern", nargs="*", default=(), help="regular expressions; tensors whose name matches one of them"
    )
    diff.add_argument("--role", help="only tensors of this role: param, exp_avg, exp_avg_sq, buffer …")
    diff.add_argument("--no-values", action="store_true", help="names, shapes, types and objects only")
    diff.add_argument(
        "--evidence",
        choices=("auto", "none", "trust"),
        default="auto",
        help="stored checksums, manifests: with --no-values (auto), never, or instead of reading what they call equal",
    )
    diff.add_argument("--tensor", metavar="KEY", dest="detail", help="one tensor in detail: histograms and where")
    diff.add_argument("--replicas", type=int, nargs=2, metavar=("I", "J"), help="copy I of A with copy J of B")
    diff.add_argument("--all", action="store_true", help="list every tensor that differs, not only the first")
    diff.add_argument("--threads", type=_positive, help="how many work side by side (default: cores, at most 8)")

    doctor = _command(commands, "doctor", "doctor", "why the loss jumped after a resume: causes, proof, remedy")
    doctor.add_argument("before", help="what was resumed from; or a run's folder, in which the steps are chosen")
    doctor.add_argument("after", nargs="?", help="a later checkpoint of the resumed run, the earlier the better")
    doctor.add_argument("--echo", metavar="PATH", help="saved again right after the load, before any update")
    doctor.add_argument("--betas", type=float, nargs=2, metavar=("B1", "B2"), help="AdamW's, where no file holds them")
    doctor.add_argument("--lr", type=float, help="learning rate, where no file holds it")
    doctor.add_argument("--weight-decay", type=float, metavar="WD", help="weight decay, where no file holds it")
    doctor.add_argument("--shallow", action="store_true", help="names, counters and arguments only; no values are read")
    doctor.add_argument("--html", metavar="FILE", help="write a page with pictures, too; it needs no network")
    doctor.add_argument("--all", action="store_true", help="everything that is known, not only a screen of it")
    doctor.add_argument("--threads", type=_positive, help="how many work side by side (default: cores, at most 8)")

    layout = _command(
        commands, "layout", "layout", "which rank holds what, as the stored boxes prove; whether it fits GPUs"
    )
    layout.add_argument("path", help="a checkpoint")
    layout.add_argument(
        "pattern", nargs="*", default=(), help="regular expressions; tensors whose name matches one of them"
    )
    layout.add_argument("--role", help="only tensors of this role: param, exp_avg, exp_avg_sq, buffer …")
    layout.add_argument("--tensor", metavar="KEY", help="one tensor: its placement and where each chunk is")
    layout.add_argument("--rank", metavar="N", help="one rank: coordinates, peers, what it stores; or a holder's label")
    layout.add_argument("--all", action="store_true", help="every rank and chunk, not only the first")
    layout.add_argument("--fit", nargs=2, metavar=("GPUS", "GB"), help="the smallest layout that fits so many GPUs")
    for axis in ("tp", "pp", "dp", "ep"):
        layout.add_argument(f"--{axis}", type=_positive, metavar="N", help=f"with --fit: size of {axis} (default: any)")
    layout.add_argument(
        "--stage", type=int, choices=range(4), help="with --fit: 0 copies, 1 states, 2 gradients, 3 all"
    )
    layout.add_argument(
        "--weights", default="stored", metavar="TYPE", help="with --fit: bf16, fp32, fp8 … or as stored"
    )
    layout.add_argument("--grads", default="weights", metavar="TYPE", help="with --fit: default: as the weights")
    layout.add_argument(
        "--master", default="auto", metavar="TYPE", help="with --fit: default: fp32 beside narrower ones"
    )
    layout.add_argument("--moments", default="fp32", metavar="TYPE", help="with --fit: of each of two (default: fp32)")
    layout.add_argument("--inference", action="store_true", help="with --fit: weights alone")
    layout.add_argument(
        "--reserve", type=float, default=0.0, metavar="GB", help="with --fit: of each GPU, for all else"
    )

    export = _command(commands, "export", "export", "write a checkpoint in another format, or cut for other ranks")
    export.add_argument("path", help="a checkpoint")
    export.add_argument("dest", nargs="?", help="a folder that is not there yet, or NAME.safetensors, NAME.pt")
    export.add_argument("--to", default="safetensors", metavar="FORMAT", help="default: safetensors")
    export.add_argument(
        "--select", action="append", metavar="PATTERN", help="tensors whose name matches this regular expression"
    )
    export.add_argument(
        "--role", default="model", help="param, exp_avg …; model: what a model loads (default); all: every tensor"
    )
    export.add_argument("--rename", metavar="NAMES", help="hf, fqn, or a JSON file {stored name: new name}")
    export.add_argument(
        "--hf-config", metavar="FILE", help="with --rename hf: facts that the checkpoint does not store"
    )
    export.add_argument("--dtype", help="bf16, fp16, fp32; fp8, fp8-tensor: weights of linear layers, with scales")
    export.add_argument("--lora", action="append", metavar="ADAPTER", help="merge this PEFT adapter into its weights")
    export.add_argument("--unscaled", action="store_true", help="cast FP8 weights that have no scale by their codes")
    export.add_argument("--mesh", help="cut for the ranks of a mesh, outermost axis first: dp=2,tp=4")
    for axis in ("pp", "dp", "fsdp", "ep", "tp"):
        export.add_argument(f"--{axis}", type=_positive, metavar="N", help=f"size of the mesh's axis {axis}")
    export.add_argument("--rules", metavar="FILE", help="JSON file with placements of its own (docs/reshard.md)")
    export.add_argument("--layers", type=_layers, metavar="N,N", help="layers of each pipeline stage (default: evenly)")
    export.add_argument(
        "--objects", action=argparse.BooleanOptionalAction, help="carry step, schedulers … (default: with --role all)"
    )
    export.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of a safetensors file (default: 5GB)")
    export.add_argument("--overwrite", action="store_true", help="replace a checkpoint that has the name")
    export.add_argument("--resume", action="store_true", help="go on with what a killed run of the same export wrote")
    export.add_argument("--verify", action="store_true", help="read the target again before it is made visible")
    export.add_argument(
        "--manifest", action=argparse.BooleanOptionalAction, default=True, help="keep the fingerprints in the folder"
    )
    export.add_argument("--dry-run", action="store_true", help="only say what would be read and written")
    export.add_argument("--threads", type=_positive, help="how many work side by side (default: cores, at most 8)")
    export.add_argument("--to-device", metavar="DEVICE", help="cuda:0, cpu …: onto a device instead of into files")
    export.add_argument("--rank", type=_number, help="with --to-device and a mesh: whose tensors")
    export.add_argument("--time", action="store_true", help="with --to-device: GB/s, beside what the bus can do")

    serve = _command(commands, "serve", "serve", "the dashboard, in a browser")
    serve.add_argument("root", help="folder with checkpoints; nothing outside it can be opened")
    serve.add_argument("--port", type=_port, default=5006, help="TCP port (default: 5006)")
    serve.add_argument("--address", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    serve.add_argument("--show", action=argparse.BooleanOptionalAction, default=False, help="open a browser")
    serve.add_argument(
        "--allow-export", nargs="?", const=".", metavar="DIR", help="may write, into this folder inside ROOT (or any)"
    )
    serve.add_argument("--auth", metavar="HOW", help="ask who it is: basic, or github, google … (docs/serving.md)")
    serve.add_argument("--user", default="workbench", help="with --auth basic: the name (default: workbench)")
    serve.add_argument(
        "--password-file", metavar="FILE", help="with --auth basic: holds the password (else: $WORKBENCH_PASSWORD)"
    )
    serve.add_argument(
        "--allow-user", action="append", default=[], metavar="NAME", help="with another --auth: who may look; or '*'"
    )
    serve.add_argument(
        "--insecure", action="store_true", help="allow an address that others can reach, without password"
    )
    serve.add_argument("--prefix", default="", metavar="PATH", help="path at which a reverse proxy shows it")
    serve.add_argument(
        "--allow-websocket-origin", action="append", default=[], metavar="HOST[:PORT]", help="as the browser sees it"
    )
    serve.add_argument("--certificate", metavar="FILE", help="PEM file; with --key it speaks TLS itself")
    serve.add_argument("--key", metavar="FILE", help="PEM file of the certificate's key")
    return top


class _Parser(argparse.ArgumentParser):
    def _print_message(self, message: str, file: Any = None) -> None:
        if file is sys.stdout:
            file.write(message)  # help that cannot be written is an error, as any result is; argparse swallows it
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
    """A command whose options may stand between its arguments: ``ls PATH --flat PATTERN``."""

    _mixing = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._mixing:  # Python 3.11's intermixed parsing comes back here
            return super().parse_known_args(args, namespace)
        self._mixing = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._mixing = False


def _common(*, top: bool = False) -> argparse.ArgumentParser:
    """Options that stand before or after the command; the latter must not reset what the former set."""
    common = argparse.ArgumentParser(add_help=False)
    group = common.add_argument_group("options of every command")

    def add(name: str, default: Any, **how: Any) -> None:
        group.add_argument(name, default=default if top else argparse.SUPPRESS, **how)

    add("--json", False, action="store_true", help="print one JSON document")
    add("--format", None, metavar="NAME", help="read as this format instead of detecting it")
    add("--partial", False, action="store_true", help="open although files are missing or truncated")
    add("--no-cache", False, action="store_true", help="neither read nor write the cache of large catalogs")
    add("--io", "mmap", choices=("mmap", "pread"), help="kept for scripts: every command reads by pread")
    return common


def _command(commands: Any, name: str, module: str, words: str) -> argparse.ArgumentParser:
    made: argparse.ArgumentParser = commands.add_parser(
        name, help=words, description=words[0].upper() + words[1:] + ".", parents=[_common()]
    )
    made.set_defaults(run=(f"workbench.cli_{module}", name))
    return made


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < int(text) < 1 << 62):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return int(text)


def _layers(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))


def _number(text: str) -> int:
    return 0 if text == "0" else _positive(text)


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) < 1 << 16):
        raise argparse.ArgumentTypeError(f"{text!r} is no TCP port")
    return int(text)
