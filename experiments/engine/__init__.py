"""A continuous-batching engine: two upstream scheduling policies over any allocator, and what executes a step."""
