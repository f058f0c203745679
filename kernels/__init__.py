"""Paged attention and its helpers in Triton: plain tensors in, plain tensors out."""
