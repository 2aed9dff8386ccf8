"""From the ledger to what a person reads: causes in their order, how sure, why, and what was looked at."""

__all__: list[str] = []
