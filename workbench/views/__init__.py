"""Render results as text, HTML and pictures; nothing here opens a file."""
