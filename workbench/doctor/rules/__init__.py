"""Rules on values, files and layouts: sums of a pass turned into signs."""
