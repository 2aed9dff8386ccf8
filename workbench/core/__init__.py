"""The arithmetic: dtypes, boxes, catalogs, byte sources, plans. Knows no format and no screen."""
