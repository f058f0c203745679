"""Benchmarks: what the allocators cost on the host, what the kernels reach on a card."""
