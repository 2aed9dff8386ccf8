"""What the trainer's own state says: counters, schedules, arguments, data; with where each fact stands."""

__all__: list[str] = []
