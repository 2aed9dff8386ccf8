"""From results to words, HTML and pictures; nothing here opens a file."""
