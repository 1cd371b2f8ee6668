"""The engine: continuous batching over the scheduler and the worker; `LLM` and `AsyncEngine` are its front ends."""
