"""The catalogue of causes: mechanism, symptom, remedy, expected damage."""

__all__: list[str] = []
