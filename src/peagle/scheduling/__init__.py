"""Which requests run next, and which pages of the KV cache they hold. Plain Python, without torch."""
