"""From signs to causes: which few explain all that was found, and what that excludes."""

__all__: list[str] = []
