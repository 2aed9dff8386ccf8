"""Where runs and cases are kept: ``WORKBENCH_LAB``, or a folder that goes when the process ends.

What was made by other sources of the lab, or by another torch, is made anew.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

__all__ = ["made"]

HERE = Path(__file__).parent
SOURCES = (*sorted(HERE.glob("*.py")), HERE.parent / "megatron_files.py", HERE.parent / "fresh" / "deepspeed_like.py")


def made(name: str, build: Callable[[Path], None]) -> Path:
    """The folder of that name, built when it is not there; processes that build it at the same time do no harm."""
    target = _root() / name
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=_root()) as work:
            content = Path(work) / "content"
            content.mkdir()
            build(content)
            try:
                content.rename(target)
            except OSError:  # another process was first
                if not target.exists():
                    raise
    return target


@cache
def _root() -> Path:
    digest = hashlib.sha256(torch.__version__.encode())
    for source in SOURCES:
        digest.update(source.read_bytes())
    kept = os.environ.get("WORKBENCH_LAB")
    if kept is None:
        kept = tempfile.mkdtemp(prefix="workbench-lab-")
        atexit.register(shutil.rmtree, kept, ignore_errors=True)
    root = Path(kept) / digest.hexdigest()[:16]
    root.mkdir(parents=True, exist_ok=True)
    return root
