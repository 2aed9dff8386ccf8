"""Where values moved: equal rows, columns and lines of two checkpoints, and the form of other changes."""
