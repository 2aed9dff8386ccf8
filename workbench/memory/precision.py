"""Bytes per element: weights, gradients, master weights and moments."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.errors import UsageError

BLOCK = 128  #: rows and columns that share one float32 scale in FP8
_BYTES = {
    "fp64": 8,
    "fp32": 4,
    "tf32": 4,
    "bf16": 2,
    "fp16": 2,
    "fp8": 1,
    "int8": 1,
    "none": 0,
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
}


def itemsize(name: str) -> int:
    """Return the bytes of an element.

    Raises:
        UsageError: the name is unknown.
    """
    if name not in _BYTES:
        raise UsageError(f"{name!r} is not a precision; known are {', '.join(list(_BYTES)[:8])}")
    return _BYTES[name]


@dataclass(frozen=True, slots=True)
class Precision:
    """The types of a parameter's tensors on a rank.

    Attributes:
        weights: ``stored`` (each as in the checkpoint) or a type. ``fp8``: weights of linear layers in FP8 with a
            float32 scale for each 128 × 128 block, the others in bf16.
        grads: ``weights`` (as the weights, in bf16 if those are FP8), a type, or ``none`` for inference.
        master: ``auto`` (fp32 if the weights are narrower), a type, or ``none``.
        moments: type of each moment, or ``none``.
        count: moments per parameter: 2 for Adam.
    """

    weights: str = "stored"
    grads: str = "weights"
    master: str = "auto"
    moments: str = "fp32"
    count: int = 2

    def __post_init__(self) -> None:
        for name, extra in (
            (self.weights, "stored"),
            (self.grads, "weights"),
            (self.master, "auto"),
            (self.moments, "fp32"),
        ):
            if name != extra:
                itemsize(name)
        if self.weights == "none":
            raise UsageError("weights cannot be 'none': there would be nothing to store")

    @classmethod
    def inference(cls, weights: str = "stored") -> Precision:
        """Return a precision with weights only."""
        return cls(weights, "none", "none", "none", 0)
