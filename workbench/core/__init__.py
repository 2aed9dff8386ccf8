"""The arithmetic: dtypes, boxes, catalogs, byte sources, plans; independent of formats and of the display."""
