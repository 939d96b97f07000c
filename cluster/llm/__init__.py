"""The Python API: `LLM`, `AsyncLLM`, their prompts, parameters and results."""
