"""Streamed passes over one checkpoint's values, or two side by side, block by block."""
