"""Real decoders of the transformers library on paged attention: loading, attention, generation, parallel heads."""
