"""The command line: one module per command, imported when the command runs.

Owns flags and printing. All logic lives in the packages below.
"""
