"""Measuring: workloads, what is counted, and reports with their provenance.

Does not know how an answer is made, only how long it took and how many tokens each target forward emitted.
"""
