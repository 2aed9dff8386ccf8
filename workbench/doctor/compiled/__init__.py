"""Kernels that numba compiles, where it can be imported: the same numbers as numpy's, in one read of each block."""

__all__ = ["NEARLY", "RUN"]

NEARLY = 1 - 1e-12  #: times a bound: what rounds to it exceeds that
RUN = 2048  #: elements of a run: some tensors' runs stay in a core's cache
