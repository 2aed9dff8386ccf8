"""What pictures of a diagnosis are drawn from: samples, shards, the run's history."""

__all__: list[str] = []
