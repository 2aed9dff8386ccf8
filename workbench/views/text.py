"""Text reprs: a checkpoint at a glance, a tensor in one line, modules as a tree, elements as NumPy shows them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from workbench.analysis.summary import Profile, Summary, profile
from workbench.checkpoint import Checkpoint
from workbench.core.words import plural
from workbench.errors import WorkbenchError
from workbench.tensor import LazyTensor
from workbench.views import facts, units
from workbench.views.lines import WIDEST, wrap
from workbench.views.names import columns, pad, safe, shorten
from workbench.views.spark import spark
from workbench.views.tree import Node, walk

BIGGEST = 4  #: modules that a checkpoint's repr lists
ODD = 4  #: oddities that it lists
SAMPLE = 1 << 18  #: maximum number of elements read for a tensor's line, which keeps it below 50 ms
BINS = 10
FEW = 8  #: number of elements up to which the values are shown


def checkpoint_text(ckpt: Checkpoint) -> str:
    """Return about 15 lines: the checkpoint's description, size, contents and oddities."""
    total = int(ckpt.catalog.tensor_nbytes.sum())
    lines = [shorten(f"{ckpt.format} checkpoint {safe(ckpt.path)}", WIDEST)]
    lines += [_field(name, value) for name, value in facts.heading(ckpt)]
    lines += _wrapped("by role", facts.describe(facts.by_role(ckpt)))
    lines += _wrapped("by dtype", facts.describe(facts.by_dtype(ckpt)))
    for at, node in enumerate(_biggest(facts.nodes(ckpt.catalog))):
        share = f"{units.nbytes(node.nbytes):>9}  {units.percent(node.nbytes, total):>5}"
        what = plural(node.tensors, "tensor") if node.shape is None or node.times > 1 else units.shape(node.shape)
        lines.append(_field("" if at else "biggest", f"{pad(shorten(node.name or _NAMELESS, 44), 44)} {share}  {what}"))
    odd = facts.oddities(ckpt)
    for sentence in odd[:ODD]:
        lines += _wrapped("note", sentence)
    if len(odd) > ODD:
        lines.append(_field("", f"… {plural(len(odd) - ODD, 'more note')}"))
    return "\n".join(lines)


def tensor_line(tensor: LazyTensor, *, limit: int | None = SAMPLE) -> str:
    """Return one line: name, shape, dtype, size; range, distribution, mean and std of up to ``limit`` elements.

    Read errors are reported in the line; nothing is raised.
    """
    parts = [tensor_heading(tensor)]
    try:
        found = profile(tensor, BINS, limit=limit)
        parts += [distribution(found), *anomalies(found.summary)]
        if _tells_more(found.summary):
            parts.append(f"= {_values_text(tensor)}")
    except WorkbenchError as error:
        parts.append(f"unreadable: {safe(error)}")
    return " ".join(part for part in parts if part)


def tensor_heading(tensor: LazyTensor) -> str:
    """Return ``name [64, 64] bf16 n=4,096 (8 KiB) 4 chunks``; nothing is read."""
    rows = tensor._payloads.catalog.rows_of(tensor._tensor)
    chunks = rows.stop - rows.start
    name = shorten(safe(tensor.key) or _NAMELESS, 60)
    size = (
        f"n={tensor.numel():,} ({units.nbytes(tensor.nbytes)})" if tensor.shape else f"({units.nbytes(tensor.nbytes)})"
    )
    role = "" if tensor.role in ("param", "other") else f" {safe(tensor.role)}"
    kind = units.dtype(tensor.element.name)
    return f"{name}{role} {units.shape(tensor.shape)} {kind} {size}" + (
        f" {plural(chunks, 'chunk')}" if chunks != 1 else ""
    )


def distribution(found: Profile) -> str:
    """Return ``x∈[-3.91 ▁▂▅█▅▂▁ 3.98] μ=0.015 σ=1``; ``≈`` in front when sampled, ``|x|`` for complex elements."""
    s = found.summary
    if s.kind == "raw bytes":
        return "raw bytes (elements share bytes)"
    if s.min is None or s.max is None:
        return "" if s.seen else "empty"
    letter = "|x|" if s.kind == "magnitudes" else "x"
    low, high = units.number(s.min), units.number(s.max)
    picture = f" {spark(found.histogram.counts)} " if found.histogram and s.seen > FEW else ", "
    span = f"{letter}∈[{low}{picture}{high}]" if s.min != s.max else f"{letter}={low}"
    mean = "" if s.finite == 1 or s.min == s.max else f" μ={units.number(s.mean)} σ={units.number(s.std)}"
    return ("" if s.exact else "≈ ") + span + mean


def anomalies(s: Summary) -> list[str]:
    """Return the anomalies of a tensor: ``NaN!``, ``+Inf!``, ``all zeros`` …, counted unless all elements have them."""
    found = []
    for word, n in (("NaN!", s.nan), ("+Inf!", s.posinf), ("-Inf!", s.neginf)):
        if n:
            found.append(f"all {word}" if n == s.seen > 1 else f"{word} ×{n:,}" if n > 1 else word)
    if s.seen > 1 and s.zero == s.seen:
        found.append("all zeros" if s.exact else "all zeros in the sample")
    return found


def tree_lines(nodes: Sequence[Node], *, depth: int | None = None) -> Iterator[str]:
    """Yield the modules and their tensors, indented, repeats folded: name, repeats, shape, dtype, bytes."""
    rows = [(level, node) for level, node in walk(nodes) if depth is None or level < depth]
    names = ["  " * level + (node.name or _NAMELESS) for level, node in rows]
    width = min(max(map(columns, names), default=0), 72)
    for name, (_, node) in zip(names, rows, strict=True):
        times = f"×{node.times:,}" if node.times > 1 else ""
        if node.shape is None:
            what = plural(node.tensors, "tensor")
        else:
            what = f"{units.shape(node.shape)} {units.dtype(node.dtype or '')}"
        yield f"{pad(name, width)}  {times:>7}  {units.nbytes(node.nbytes):>10}  {what}"


def _field(name: str, value: str) -> str:
    return f"  {name:<11} {shorten(value, WIDEST - 14)}"


def _wrapped(name: str, value: str) -> list[str]:
    # sizes and their units, and roles and their sizes, stay on one line
    whole = re.sub(r"(?<! ·) (?!·)", "\u00a0", value) if " · " in value else value
    return [line.replace("\u00a0", " ") for line in wrap(f"  {name:<11} ", whole, most=2)]


def _biggest(nodes: Sequence[Node]) -> list[Node]:
    """Return the largest modules; one that makes up nearly everything is replaced by its children."""
    shown = list(nodes)
    total = sum(node.nbytes for node in nodes)
    while True:
        whole = [node for node in shown if node.children and node.nbytes > 0.6 * total and "[" not in node.name]
        if not whole:
            break
        at = shown.index(whole[0])
        inner = [_under(whole[0], child) for child in whole[0].children]
        shown[at : at + 1] = inner
    return sorted(shown, key=lambda node: -node.nbytes)[:BIGGEST]


def _under(parent: Node, child: Node) -> Node:
    name = f"{parent.name}.{child.name}"
    return Node(name, child.times, child.tensors, child.nbytes, child.shape, child.dtype, child.children)


def _tells_more(s: Summary) -> bool:
    """Return whether the elements are worth showing: few, numeric, and not all equal."""
    return s.kind == "numbers" and 1 < s.numel <= FEW and not (s.finite == s.seen and s.min == s.max)


def _values_text(tensor: LazyTensor) -> str:
    from workbench.analysis.numbers import Decoder

    values = Decoder(tensor.element).numbers(tensor.numpy().reshape(-1)).reshape(tensor.shape).tolist()
    return _nested(values)


def _nested(values: object) -> str:
    if isinstance(values, list):
        return f"[{', '.join(map(_nested, values))}]"
    if isinstance(values, float):
        return f"{values:.4g}" if math.isfinite(values) else str(values)
    return f"{values}"


_NAMELESS = "''"
