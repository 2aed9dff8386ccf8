"""The one pass that fills target files: read, change, hash and write each byte once."""
