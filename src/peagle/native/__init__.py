"""CPU kernels of our own, compiled by llvmlite: decoder layers over a few rows, from weights as they are stored.

torch's float32 kernels on a CPU read four bytes per weight and cost Python time per operation. These read two bytes or
half a byte, compute in float32, and run a whole decoder layer in one call. Where they are not available, torch runs.
"""
