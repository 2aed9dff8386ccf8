"""The ranks of a job that load together: if one rank fails, all of them raise its error.

Every rank calls the same collectives in the same order so that an error on one never leaves the others waiting.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from workbench import errors
from workbench.errors import UsageError, WorkbenchError


class Ranks:
    """A process group, or one process alone.

    Attributes:
        group: the ``torch.distributed`` group, or ``None``.
        rank: number of this process in it.
        size: number of ranks.
    """

    def __init__(self, process_group: Any = None) -> None:
        """Create the ranks of ``process_group``, or of the default group if ``torch.distributed`` is initialised, or
        one rank.

        Raises:
            UsageError: this process is not a member of the group.
        """
        import torch.distributed as dist

        self.group, self.rank, self.size = process_group, 0, 1
        if process_group is None and dist.is_available() and dist.is_initialized():
            self.group = dist.group.WORLD
        if self.group is not None:
            self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise UsageError("this process is not a member of process_group; call load only on its members")

    def gather(self, value: Any) -> list[Any]:
        """Gather a value from every rank, in rank order."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, self.group)
        return found

    @contextmanager
    def together(self) -> Iterator[None]:
        """Work without collectives, after which an error on one rank is raised on all, with that rank's number."""
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        failures = self.gather(None if error is None else (type(error).__name__, str(error)))
        if error is not None:
            if self.size == 1 or not isinstance(error, WorkbenchError):
                raise error
            raise type(error)(f"rank {self.rank}: {error}") from error
        for rank, one in enumerate(failures):
            if one is not None:
                kind, text = getattr(errors, one[0], None), one[1]
                if isinstance(kind, type) and issubclass(kind, WorkbenchError):
                    raise kind(f"rank {rank}: {text}")
                raise WorkbenchError(f"rank {rank} failed with {one[0]}: {text}")
