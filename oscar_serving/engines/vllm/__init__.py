"""The adapter to vLLM 0.33: a plugin for the stock wheel. vLLM's API is touched in this folder only."""
