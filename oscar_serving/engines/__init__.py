"""Adapters to inference engines; each engine's API is touched in its own folder only."""
