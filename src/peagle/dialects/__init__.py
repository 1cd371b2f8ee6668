"""Dialects: how a model writes its thinking and its tool calls, and how to read both from a growing answer."""
