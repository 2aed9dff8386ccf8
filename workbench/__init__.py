"""The checkpoint workbench: open any trainer's sharded checkpoint as one global view, lazily, exactly, safely.

>>> import workbench as wb
>>> ckpt = wb.open("sample_ckpts/dcp_fsdp2")  # doctest: +SKIP
>>> ckpt["model.model.embed_tokens.weight"][2:4, :3]  # doctest: +SKIP
"""

import sys
from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING

from workbench import errors
from workbench.analysis.name_map import NameMap, name_map
from workbench.checkpoint import Checkpoint, discover, open
from workbench.tensor import LazyTensor

if TYPE_CHECKING:
    from typing import Any

    from workbench import dcp
    from workbench.analysis.diff import Diff, diff
    from workbench.analysis.layout import Layout, layout
    from workbench.analysis.report import Report
    from workbench.analysis.run import Run, RunComparison, compare, run
    from workbench.analysis.seal import seal
    from workbench.analysis.stats import stats
    from workbench.analysis.timeline import timeline
    from workbench.analysis.verify import verify
    from workbench.core.mesh.mesh import Mesh
    from workbench.doctor.examine import doctor
    from workbench.doctor.reasoning.diagnosis import Diagnosis
    from workbench.echo.echo import echo
    from workbench.echo.report import EchoReport
    from workbench.export.export import export
    from workbench.export.report import ExportReport
    from workbench.export.sharding.rules import Rules
    from workbench.load.load import load
    from workbench.load.report import LoadReport
    from workbench.memory import Budget, Precision, plan_memory

__all__ = [
    "Budget",
    "Checkpoint",
    "Diagnosis",
    "Diff",
    "EchoReport",
    "ExportReport",
    "Layout",
    "LazyTensor",
    "LoadReport",
    "Mesh",
    "NameMap",
    "Precision",
    "Report",
    "Rules",
    "Run",
    "RunComparison",
    "compare",
    "dcp",
    "diff",
    "discover",
    "doctor",
    "echo",
    "errors",
    "export",
    "layout",
    "load",
    "name_map",
    "open",
    "plan_memory",
    "run",
    "seal",
    "stats",
    "timeline",
    "verify",
]

__version__ = "0.1.0"

#: Analyses and exports are imported on first use, so that opening a checkpoint does not wait for them.
_LATER = {
    "Budget": "workbench.memory",
    "Diagnosis": "workbench.doctor.reasoning.diagnosis",
    "Diff": "workbench.analysis.diff",
    "EchoReport": "workbench.echo.report",
    "ExportReport": "workbench.export.report",
    "Layout": "workbench.analysis.layout",
    "LoadReport": "workbench.load.report",
    "Mesh": "workbench.core.mesh.mesh",
    "Precision": "workbench.memory",
    "Report": "workbench.analysis.report",
    "Rules": "workbench.export.sharding.rules",
    "Run": "workbench.analysis.run",
    "RunComparison": "workbench.analysis.run",
    "compare": "workbench.analysis.run",
    "diff": "workbench.analysis.diff",
    "doctor": "workbench.doctor.examine",
    "echo": "workbench.echo.echo",
    "export": "workbench.export.export",
    "layout": "workbench.analysis.layout",
    "load": "workbench.load.load",
    "plan_memory": "workbench.memory",
    "run": "workbench.analysis.run",
    "seal": "workbench.analysis.seal",
    "stats": "workbench.analysis.stats",
    "timeline": "workbench.analysis.timeline",
    "verify": "workbench.analysis.verify",
}
#: Functions that show a progress bar when called in IPython.
_LONG = {"diff", "doctor", "echo", "export", "layout", "load", "plan_memory", "seal", "stats", "timeline", "verify"}


def __getattr__(name: str) -> object:
    from importlib import import_module

    from workbench.core.source import needs_descriptors

    if name in ("dcp", "notebook"):
        return import_module(f"workbench.{name}")
    if name == "load_ipython_extension":  # `%load_ext workbench` asks for it by this name
        return import_module("workbench.notebook").complete_names
    if name not in _LATER:
        raise AttributeError(f"module 'workbench' has no attribute {name!r}")
    with needs_descriptors():
        found: Any = getattr(import_module(_LATER[name]), name)
        if name in _LONG:
            from workbench.views.progress import followed

            found = followed(found)
    globals()[name] = found
    return found


class _Facade(_ModuleType):
    def __setattr__(self, name: str, value: object) -> None:
        # `import workbench.doctor.examine` would put the package `doctor` where the function `doctor` belongs
        if not (name in _LATER and isinstance(value, _ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Facade


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
