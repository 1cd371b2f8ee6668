"""Serving a drafter with vLLM: its command line, its process, manifests, and a proxy in front of it."""
