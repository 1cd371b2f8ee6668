"""The device side of an engine: prefill and decode passes, their CUDA graphs, the KV cache, and the runner."""
