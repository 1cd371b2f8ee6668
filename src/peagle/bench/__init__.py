"""Benchmarks: offline sweeps of the engine, load tests of a server, and their reports.

Measures time and tokens only; nothing here knows how an answer is generated.
"""
