"""Workloads that need no download, each from a seed."""
