"""Prefill engine to decode engine: what they say, and how pages cross."""
