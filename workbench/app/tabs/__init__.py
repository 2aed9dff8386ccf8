"""The tabs of the page, one file each; none knows of another, all share the state."""

__all__: list[str] = []
