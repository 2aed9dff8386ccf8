"""Where rows come from: which row of an earlier tensor, or of a sibling, a row is."""

__all__: list[str] = []
