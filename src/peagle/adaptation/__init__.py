"""Adapting a drafter to the text it is served, and swapping it into a running server."""
