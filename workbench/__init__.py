"""The checkpoint workbench: open any trainer's sharded checkpoint as one global view, lazily, exactly, safely.

>>> import workbench as wb
>>> ckpt = wb.open("sample_ckpts/dcp_fsdp2")  # doctest: +SKIP
>>> ckpt["model.model.embed_tokens.weight"][2:4, :3]  # doctest: +SKIP
"""

from typing import TYPE_CHECKING

from workbench import errors
from workbench.checkpoint import Checkpoint, discover, open
from workbench.namemap import NameMap, name_map
from workbench.tensor import LazyTensor

if TYPE_CHECKING:
    from typing import Any

    from workbench.analysis.diff import Diff, diff
    from workbench.analysis.layout import Layout, layout
    from workbench.analysis.report import Report
    from workbench.analysis.stats import stats
    from workbench.analysis.timeline import timeline
    from workbench.analysis.verify import verify
    from workbench.doctor.examine import doctor
    from workbench.doctor.reasoning.diagnosis import Diagnosis
    from workbench.echoes.echo import echo
    from workbench.echoes.report import EchoReport
    from workbench.reshard.export import export
    from workbench.reshard.load import load
    from workbench.reshard.loading.report import LoadReport
    from workbench.reshard.mesh import Mesh
    from workbench.reshard.planner import Budget, Precision, plan_memory
    from workbench.reshard.report import ExportReport
    from workbench.reshard.rules import Rules

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
    "stats",
    "timeline",
    "verify",
]

__version__ = "0.1.0"

#: Analyses and exports are imported when they are first asked for: opening a checkpoint does not wait for them.
_LATER = {
    "Budget": "workbench.reshard.planner",
    "Diagnosis": "workbench.doctor.reasoning.diagnosis",
    "Diff": "workbench.analysis.diff",
    "EchoReport": "workbench.echoes.report",
    "ExportReport": "workbench.reshard.report",
    "Layout": "workbench.analysis.layout",
    "LoadReport": "workbench.reshard.loading.report",
    "Mesh": "workbench.reshard.mesh",
    "Precision": "workbench.reshard.planner",
    "Report": "workbench.analysis.report",
    "Rules": "workbench.reshard.rules",
    "diff": "workbench.analysis.diff",
    "doctor": "workbench.doctor.examine",
    "echo": "workbench.echoes.echo",
    "export": "workbench.reshard.export",
    "layout": "workbench.analysis.layout",
    "load": "workbench.reshard.load",
    "plan_memory": "workbench.reshard.planner",
    "stats": "workbench.analysis.stats",
    "timeline": "workbench.analysis.timeline",
    "verify": "workbench.analysis.verify",
}
#: Those that show how far they are, called in IPython.
_LONG = {"diff", "doctor", "export", "layout", "load", "plan_memory", "stats", "timeline", "verify"}


def __getattr__(name: str) -> object:
    from importlib import import_module

    from workbench.core.source import needs_descriptors

    if name == "notebook":
        return import_module("workbench.notebook")
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


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
