"""Anything with a clock, a trace, a model or a figure."""
