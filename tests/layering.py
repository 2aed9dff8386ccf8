"""Which room of the package a module belongs to, and what it imports, read from the source alone.

::

    errors ◄ core ◄ names ◄ formats ◄ tensor ◄ runs ◄ checkpoint ◄ analysis ◄ export ◄ load, memory ◄ doctor, dcp
                                          app, cli ► `import workbench` (facade) ► views, echo ────────────▲

There are no exceptions: imports in functions and for types alone count. A result finds its picture by a dotted name
(``workbench.core.shown``).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

#: A room may import rooms of lower rank and its own; rooms of one rank do not know each other.
RANK = {
    "errors": 0,
    "core": 1,
    "names": 2,  # what stored names mean
    "formats": 3,
    "tensor": 4,
    "runs": 5,  # the checkpoints under a folder
    "checkpoint": 6,
    "analysis": 8,
    "export": 9,  # an export keeps a manifest
    "load": 10,
    "memory": 10,
    "doctor": 11,
    "dcp": 11,  # what trainers save with; boxes of live tensors as a load cuts them
    "echo": 12,  # of live trainers: the doctor's rules on them
    "views": 12,
    "notebook": 12,  # extensions of Panel, no more
    "workbench": 13,  # the facade, workbench/__init__.py
    "app": 14,
    "cli": 15,
    "__main__": 16,
}

#: Part of a format's bytes that another format embeds: decoders, not readers.
SHARED_DECODERS = {
    "workbench.formats.dcp.metadata",
    "workbench.formats.dcp.lanes",
    "workbench.formats.safetensors.header",
    "workbench.formats.safetensors.ranks",
    "workbench.formats.safetensors.weight_index",  # Hugging Face's, of whatever files
    "workbench.formats.torch.file",
    "workbench.formats.layered.parts",  # joins what the registry read, for layouts of several formats
}


@dataclass(frozen=True)
class Import:
    """One ``import`` statement: ``target`` is the most exact module that it is known to reach."""

    source: str
    target: str
    line: int
    function: str | None  # the innermost function around it; None: runs when the module is imported
    type_only: bool  # under ``if TYPE_CHECKING``


def modules(package: Path) -> dict[str, Path]:
    """Dotted name → file for every module of a package folder."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = [package.name, *path.relative_to(package).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text("utf-8"))


def imports(name: str, path: Path, known: set[str]) -> list[Import]:
    """Every import of one module, at any depth, with relative ones made absolute."""
    is_package = path.name == "__init__.py"
    out = []
    for node, function, type_only in _walk(parsed(path), None, False):
        for target in _targets(node, name, is_package, known):
            out.append(Import(name, target, node.lineno, function, type_only))
    return out


def room(module: str) -> str:
    """The room of a module of ours: ``workbench.core.box`` → ``core``; ``workbench.cli.show`` → ``cli``."""
    parts = module.split(".")
    if len(parts) == 1:
        return parts[0]
    return parts[1]


def forbidden(item: Import) -> str | None:
    """Why an import breaks the direction, or ``None``."""
    if item.target.split(".")[0] != "workbench":
        return None
    source, target = room(item.source), room(item.target)
    for unknown in {source, target} - RANK.keys():
        return f"room {unknown!r} has no place in the order; give it one in tests/layering.py"
    if source != target and RANK[target] >= RANK[source]:
        return f"{source} may not import {target}"
    if source == target == "formats" and _reaches_a_reader(item):
        return "a format may not import another; ask formats.reader(name)"
    return None


def circles(edges: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    """The edges that lie on a circle or between two; none where the nodes can be put in an order."""
    left = {(a, b) for a, b in edges if a != b}
    while True:
        leaves, roots = {b for _, b in left} - {a for a, _ in left}, {a for a, _ in left} - {b for _, b in left}
        kept = {(a, b) for a, b in left if a not in roots and b not in leaves}
        if kept == left:
            return left
        left = kept


def inside(folder: str, items: Iterable[Import]) -> set[tuple[str, str]]:
    """Imports among the direct children of a folder: ``core.mesh.cut → core.box`` is ``core.mesh → core.box``."""
    depth = folder.count(".") + 2
    found = set()
    for item in items:
        if item.source.startswith(f"{folder}.") and item.target.startswith(f"{folder}."):
            found.add((".".join(item.source.split(".")[:depth]), ".".join(item.target.split(".")[:depth])))
    return found


def _reaches_a_reader(item: Import) -> bool:
    if item.target == "workbench.formats" or item.source == "workbench.formats":
        return False
    if item.target in SHARED_DECODERS:
        return False
    if item.target == "workbench.formats.format":  # the record
        return False
    source, target = (m.split(".")[2] for m in (item.source, item.target))  # a family is a folder
    return source != target


def _walk(node: ast.AST, function: str | None, type_only: bool) -> Iterator[tuple[ast.AST, str | None, bool]]:
    for child in ast.iter_child_nodes(node):
        inner, inner_type_only = function, type_only
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = child.name
        if isinstance(child, ast.If) and _named(child.test) == "TYPE_CHECKING":
            yield from _walk(ast.Module(child.body, []), function, True)
            yield from _walk(ast.Module(child.orelse, []), function, type_only)
            continue
        yield child, function, type_only
        yield from _walk(child, inner, inner_type_only)


def _named(node: ast.AST) -> str:
    """The last part of a dotted name."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _targets(node: ast.AST, name: str, is_package: bool, known: set[str]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parts = name.split(".")
            parts = parts[: len(parts) - node.level + is_package]
            base = ".".join([*parts, base] if base else parts)
        # `from workbench import errors` reaches the module, `from workbench import open` the facade
        return [f"{base}.{a.name}" if f"{base}.{a.name}" in known else base for a in node.names]
    if isinstance(node, ast.Call) and _named(node.func) in {"import_module", "__import__"} and node.args:
        first = node.args[0]
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            return [first.value]
    return []
