"""Targets that are visible whole or not at all, whatever happens on the way."""
