"""Measurements: the signs of rules, and the ledger of every quantity."""
