"""Kernels that numba compiles, where it is installed: the same numbers as numpy's, element by element, in one read."""

__all__: list[str] = []
