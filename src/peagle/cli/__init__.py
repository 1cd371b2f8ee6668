"""The command line: one module for each command, loaded when the command runs.

Owns flags, progress and what is printed where; every decision about models is made in the rows below.
"""
