"""The real allocators of vLLM and SGLang, driven by the same random operations as ours."""
