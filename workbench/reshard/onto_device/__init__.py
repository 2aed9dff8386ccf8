"""Onto a device through a ring of host buffers."""
