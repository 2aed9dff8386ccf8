"""From the ledger to the report: ranked causes with certainty and reasons, and what was examined."""
