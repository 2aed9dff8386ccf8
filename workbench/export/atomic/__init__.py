"""Atomic targets: either completely visible or not at all, whatever happens during the write."""
