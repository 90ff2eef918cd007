"""Start, readiness and stop of the engine behind an application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from oscar_serving.server.state import ServerState


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Start the engine, put a real request through it before the first client's; drain it at the end."""
    state: ServerState = app.state.oscar
    state.engine.start()
    try:
        await asyncio.to_thread(state.engine.warmup)
        state.ready = True
        yield
    finally:
        await state.stop()
        state.prompts.close()
