"""Kernels: each has one signature, a PyTorch implementation, and a Triton one (`*_triton.py`) for GPUs.

Triton is imported at the first GPU tensor, so a CPU does not need it. Knows nothing of models or of the engine.
"""
