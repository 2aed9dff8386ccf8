"""What a load did, on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["LoadReport"]


@dataclass(frozen=True)
class LoadReport:
    """One rank's part of a load.

    Attributes:
        loaded: names of the state dict's tensors that were filled.
        missing: name → why the checkpoint has nothing for it; tensors and other values alike.
        mismatched: name → what differs from what is stored; these tensors were left as they were.
        unexpected: keys of the checkpoint that no rank asked for, of the roles that some rank did ask for.
        objects: name → value, for what is no tensor. Plain values were also set in the state dict.
        read_nbytes: bytes that this rank asked of the checkpoint's files, metadata apart.
        received_nbytes: bytes of elements that other ranks read for it.
        seconds: from the call to its return.
    """

    loaded: tuple[str, ...]
    missing: Mapping[str, str] = field(default_factory=dict)
    mismatched: Mapping[str, str] = field(default_factory=dict)
    unexpected: tuple[str, ...] = ()
    objects: Mapping[str, Any] = field(default_factory=dict)
    read_nbytes: int = 0
    received_nbytes: int = 0
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; of ``objects`` the names only, whose values may be anything."""
        return {
            "loaded": list(self.loaded),
            "missing": dict(self.missing),
            "mismatched": dict(self.mismatched),
            "unexpected": list(self.unexpected),
            "objects": list(self.objects),
            "read_nbytes": self.read_nbytes,
            "received_nbytes": self.received_nbytes,
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        exchanged = f", {self.received_nbytes:,} received" if self.received_nbytes else ""
        told = (
            f"loaded {len(self.loaded):,} tensors in {self.seconds:.1f} s: {self.read_nbytes:,} bytes read{exchanged}"
        )
        counts = {"missing": self.missing, "mismatched": self.mismatched, "unexpected": self.unexpected}
        return "; ".join([told, *(f"{len(found):,} {what}" for what, found in counts.items() if found)])
