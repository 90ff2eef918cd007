"""The application: routes and what stands around them."""

from __future__ import annotations

from fastapi import FastAPI

from oscar_serving.engines.hf import Engine
from oscar_serving.server.auth import ApiKeyGuard
from oscar_serving.server.errors import install_error_handlers
from oscar_serving.server.lifecycle import lifespan
from oscar_serving.server.limits import BodyLimit
from oscar_serving.server.logs import RequestLog
from oscar_serving.server.openapi import document
from oscar_serving.server.routes import router
from oscar_serving.server.settings import ServerSettings
from oscar_serving.server.state import ServerState
from oscar_serving.version import __version__


def create_app(engine: Engine, settings: ServerSettings) -> FastAPI:
    """An application that serves ``engine``; its lifespan starts the engine and shuts it down."""
    app = FastAPI(
        title="OSCAR Serving",
        version=__version__,
        description="OpenAI-compatible server on a 2-bit KV cache.",
        docs_url=None,  # their pages load scripts from elsewhere
        redoc_url=None,
        lifespan=lifespan,
    )
    app.state.oscar = ServerState(engine, settings)
    app.include_router(router)
    app.openapi = lambda: document(app, needs_key=settings.api_key is not None)  # type: ignore[method-assign]
    install_error_handlers(app)
    # The last one added is the outermost: every request is logged, and nothing of it is read before its key is checked.
    app.add_middleware(BodyLimit, limit=settings.max_body_bytes)
    if settings.api_key is not None:
        app.add_middleware(ApiKeyGuard, api_key=settings.api_key)
    app.add_middleware(RequestLog)
    return app
