"""The HTTP server: OpenAI's routes in front of the asynchronous engine.

Importing the package is cheap. Its modules need the extra `serve`, except `settings` and `sse`.
"""
