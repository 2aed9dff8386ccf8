"""Save in torch's distributed checkpoint format: balanced, atomic, with evidence made while writing."""

from workbench.dcp.planner import Planner
from workbench.dcp.writer import Writer

__all__ = ["Planner", "Writer"]
