"""Replace torch's writer and planner in a process whose trainer constructs them itself.

accelerate, Trainer, Lightning and torchtitan construct ``FileSystemWriter`` and ``DefaultSavePlanner`` themselves and
offer no argument for others. ``install`` replaces them with subclasses that take the same arguments, by name, in every
module that has imported them.
"""

from __future__ import annotations

import inspect
import sys
import threading
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from workbench.dcp.planner import Planner
from workbench.dcp.writer import Writer
from workbench.errors import UsageError

TESTED = ("2.6", "2.9", "2.13")  #: versions of torch that were tested
_LOCK = threading.Lock()
_REPLACED: list[tuple[Any, str, type, type]] = []  #: module, name, torch's class, ours


class InstalledWriter(Writer):
    """The replacement of ``FileSystemWriter`` after :func:`install`."""

    options: ClassVar[dict[str, Any]] = {}

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return torch's own writer for arguments that ours does not support."""
        if kwargs.get("_extensions") or getattr(kwargs.get("serialization_format"), "name", "") == "SAFETENSORS":
            return FileSystemWriter(*args, **kwargs)
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(Writer.__init__).bind_partial(self, *args, **kwargs).arguments
        given |= given.pop("options", {})
        del given["self"]
        super().__init__(**{**given, **self.options})


def install(**writer_options: Any) -> list[str]:
    """Replace torch's ``FileSystemWriter`` by ``wb.dcp.Writer`` and ``DefaultSavePlanner`` by ``wb.dcp.Planner``.

    For trainers that construct the writer themselves. It applies to this process, to all modules that have imported
    the two classes, and to later imports; call it before the trainer starts. Classes that already derive from torch's
    are not changed.

    Args:
        writer_options: arguments of ``wb.dcp.Writer`` except the path, which take precedence over the trainer's.

    Returns:
        the replaced names, as ``module.name``; they are also printed.

    Raises:
        UsageError: a version of torch that this was not tested with, or an unknown option.
    """
    version = ".".join(torch.__version__.split(".")[:2])
    if version not in TESTED:
        raise UsageError(
            f"install() was tested with torch {', '.join(TESTED)} and this is {torch.__version__}; pass wb.dcp.Writer "
            "and wb.dcp.Planner to dcp.save yourself"
        )
    known = set(inspect.signature(Writer.__init__).parameters) - {"self", "path", "options"}
    if unknown := sorted(writer_options.keys() - known):
        raise UsageError(f"wb.dcp.Writer has no option {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    uninstall()
    with _LOCK:
        InstalledWriter.options = dict(writer_options)
        ours = {id(FileSystemWriter): InstalledWriter, id(DefaultSavePlanner): Planner}
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] == "workbench" or module is None:
                continue
            for attribute, value in list(getattr(module, "__dict__", {}).items()):
                if (new := ours.get(id(value))) is not None:  # by identity: proxies warn when they are accessed
                    setattr(module, attribute, new)
                    _REPLACED.append((module, attribute, value, new))
        found = [f"{module.__name__}.{attribute}" for module, attribute, *_ in _REPLACED]
    print(f"wb.dcp.install() replaced {', '.join(found)}")
    return found


def uninstall() -> None:
    """Restore what :func:`install` replaced; does nothing if nothing is installed."""
    with _LOCK:
        for module, attribute, theirs, ours in _REPLACED:
            if getattr(module, attribute, None) is ours:
                setattr(module, attribute, theirs)
        _REPLACED.clear()
        InstalledWriter.options = {}
