"""Tensor primitives with one signature, a plain PyTorch implementation, and a Triton one for GPUs.

Triton is imported when the first tensor on a GPU arrives, so everything works on a CPU without it. Knows nothing of
models, requests or steps.
"""
