"""Which room of the package a module belongs to, and what it imports, read from the source alone.

::

    errors ◄ core ◄ naming ◄ formats ◄ tensor ◄ runs ◄ checkpoint ◄ namemap ◄ analysis ◄ reshard ◄ doctor ◄ views
                                                          ▲
                                           `import workbench` (facade) ◄ app ◄ cli
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: A room may import rooms of lower rank and its own; rooms of one rank do not know each other.
RANK = {
    "errors": 0,
    "core": 1,
    "param_ids": 1,  # an optimizer's numbers
    "step": 1,  # of the trainer
    "slices": 1,  # as people write them
    "naming": 2,
    "conventions": 2,  # how frameworks name and fuse one weight
    "formats": 3,
    "tensor": 4,
    "completeness": 4,  # of a checkpoint's files
    "runs": 5,  # the checkpoints under a folder
    "checkpoint": 6,
    "namemap": 7,  # two checkpoints side by side
    "analysis": 8,
    "reshard": 9,  # an export keeps a manifest
    "doctor": 10,
    "echoes": 11,  # of live trainers: the doctor's rules on them
    "views": 11,
    "notebook": 11,  # extensions of Panel, no more
    "workbench": 12,  # the facade, workbench/__init__.py
    "app": 13,
    "cli": 14,
    "__main__": 15,
}

#: Part of a format's bytes that another format embeds: decoders, not readers.
SHARED_DECODERS = {
    "workbench.formats.dcp_metadata",
    "workbench.formats.dcp_lanes",
    "workbench.formats.safetensors_header",
    "workbench.formats.safetensors_ranks",
    "workbench.formats.weight_index",  # Hugging Face's, of whatever files
    "workbench.formats.paddle_names",
    "workbench.formats.paddle_pickle",  # paddle's pickles, which its three formats hold
    "workbench.formats.paddle_tree",
    "workbench.formats.parts",  # joins what the registry read, for layouts of several formats
}

#: An object asks the views for its own picture, and only there.
REPR_METHODS = {"__repr__", "_repr_html_"}
#: A method that is another room's work, asked for when it is called.
DELEGATES = {
    ("checkpoint", "to_device"): "reshard",
    ("checkpoint", "view"): "app",
    ("checkpoint", "_followed"): "views",
    ("analysis", "view"): "app",
}
REPR_ROOMS = {"tensor", "checkpoint", "analysis", "reshard", "doctor"}


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


def imports(name: str, path: Path, known: set[str]) -> list[Import]:
    """Every import of one module, at any depth, with relative ones made absolute."""
    is_package = path.name == "__init__.py"
    out = []
    for node, function, type_only in _walk(ast.parse(path.read_text("utf-8")), None, False):
        for target in _targets(node, name, is_package, known):
            out.append(Import(name, target, node.lineno, function, type_only))
    return out


def room(module: str) -> str:
    """The room of a module of ours: ``workbench.core.box`` → ``core``; ``workbench.cli_show`` → ``cli``."""
    parts = module.split(".")
    if len(parts) == 1:
        return parts[0]
    return "cli" if parts[1].startswith("cli_") else parts[1]


def forbidden(item: Import) -> str | None:
    """Why an import breaks the direction, or ``None``."""
    if item.target.split(".")[0] != "workbench":
        return None
    source, target = room(item.source), room(item.target)
    for unknown in {source, target} - RANK.keys():
        return f"room {unknown!r} has no place in the order; give it one in tests/layering.py"
    if target == "views" and source in REPR_ROOMS and item.function in REPR_METHODS:
        return None
    for (delegating, method), other in DELEGATES.items():
        if (source, target) == (delegating, other) and (item.function == method or item.type_only):
            return None
    if source != target and RANK[target] >= RANK[source]:
        return f"{source} may not import {target}"
    if source == target == "formats" and _reaches_a_reader(item):
        return "a format may not import another; ask formats.reader(name)"
    return None


def _reaches_a_reader(item: Import) -> bool:
    if item.target == "workbench.formats" or item.source == "workbench.formats":
        return False
    if item.target in SHARED_DECODERS:
        return False
    # torch_save may be split into torch_save.py and torch_save_legacy.py: parts carry the format's name
    source, target = (m.split(".")[2].split("_")[0] for m in (item.source, item.target))
    return source != target


def _walk(node: ast.AST, function: str | None, type_only: bool) -> Iterator[tuple[ast.AST, str | None, bool]]:
    for child in ast.iter_child_nodes(node):
        inner, inner_type_only = function, type_only
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = child.name
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from _walk(ast.Module(child.body, []), function, True)
            yield from _walk(ast.Module(child.orelse, []), function, type_only)
            continue
        yield child, function, type_only
        yield from _walk(child, inner, inner_type_only)


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
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        called = ast.unparse(node.func).rsplit(".", 1)[-1]
        if called in {"import_module", "__import__"} and isinstance(node.args[0].value, str):
            return [node.args[0].value]
    return []
