"""The adapter to SGLang 0.5.23: a plugin for the stock wheel. SGLang's API is touched in this folder only."""
