"""Fixtures of the server tests, for evaluating an endpoint."""

from tests.server.conftest import load, model_folder

__all__ = ["load", "model_folder"]
