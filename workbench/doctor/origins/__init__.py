"""Where values went: equal rows, columns and lines of two checkpoints, and the form of what has none."""

__all__: list[str] = []
