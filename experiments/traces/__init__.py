"""Readers for public trace formats, and where to get the traces."""
