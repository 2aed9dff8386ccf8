"""A checkpoint beside its echo, bit for bit: what changed in the load, and in which form."""

__all__: list[str] = []
