"""The OpenAI-compatible server of the embedded engine."""

from oscar_serving.server.app import create_app
from oscar_serving.server.run import bind, run_server
from oscar_serving.server.settings import ServerSettings

__all__ = ["ServerSettings", "bind", "create_app", "run_server"]
