"""Save in torch's distributed checkpoint format: balanced, atomic, with digests computed while writing."""

from workbench.dcp.installed import install, uninstall
from workbench.dcp.monitor import Monitor
from workbench.dcp.planner import Planner
from workbench.dcp.writer import Writer

__all__ = ["Monitor", "Planner", "Writer", "install", "uninstall"]
