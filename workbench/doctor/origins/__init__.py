"""Where values moved: equal rows, columns and lines of two checkpoints, and the form of other changes.

What reads tensors raises ``OpenError`` if one cannot be read, and ``HoleError`` if an element is not stored.
"""
