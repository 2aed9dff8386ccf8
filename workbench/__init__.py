"""The checkpoint workbench: open any trainer's sharded checkpoint as one global view, lazily, exactly, safely.

>>> import workbench as wb
>>> ckpt = wb.open("sample_ckpts/dcp_fsdp2")  # doctest: +SKIP
>>> ckpt["model.model.embed_tokens.weight"][2:4, :3]  # doctest: +SKIP
"""

from workbench import errors
from workbench.checkpoint import Checkpoint, discover, open
from workbench.namemap import NameMap, name_map
from workbench.tensor import LazyTensor

__all__ = ["Checkpoint", "LazyTensor", "NameMap", "discover", "errors", "name_map", "open"]

__version__ = "0.1.0"
