"""Data for the pictures of a diagnosis: samples, shards, the run's history."""
