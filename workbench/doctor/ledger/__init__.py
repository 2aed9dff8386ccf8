"""Measurements: the signs of rules, and the ledger of every quantity."""

__all__: list[str] = []
