"""The server process: sockets, signals, uvicorn."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from oscar_serving.engines.hf import Engine
from oscar_serving.server.app import create_app
from oscar_serving.server.logs import configure_logging
from oscar_serving.server.settings import ServerSettings
from oscar_serving.server.state import ServerState

#: Seconds for the last answers to go out after the engine has stopped.
_GRACE = 5


def bind(settings: ServerSettings) -> socket.socket:
    """A bound socket that does not listen yet, so that a taken port is known before the model is loaded.

    Raises
    ------
    OSError
        The address or the port cannot be had; the message names both.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # The protocol is named, or asyncio does not turn Nagle off on what is accepted: answers then wait 40 ms for an ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {settings.host} port {settings.port}: {error}") from error
    return listener


def run_server(
    engine: Engine, settings: ServerSettings, listener: socket.socket, on_ready: Callable[[str], None]
) -> None:
    """Serve until SIGTERM or SIGINT, then let running requests finish; a second signal ends the process at
    once.

    Parameters
    ----------
    listener
        From :func:`bind`; closed at the end.
    on_ready
        Called with the server's URL when it has answered a first request of its own.
    """
    configure_logging(settings.log_level, settings.log_format)
    app = create_app(engine, settings)
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=settings.drain_timeout + _GRACE,
    )
    _Server(config, app.state.oscar, lambda: on_ready(url)).run(sockets=[listener])


class _Server(uvicorn.Server):
    """Drains the engine while uvicorn drains its connections, and leaves with status 0 when asked to stop."""

    def __init__(self, config: uvicorn.Config, state: ServerState, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._state = state
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except OSError as error:  # two servers may bind one port, until the first one listens
            await self.lifespan.shutdown()
            host, port = sockets[0].getsockname()[:2] if sockets else (self.config.host, self.config.port)
            raise OSError(f"cannot listen on {host} port {port}: {error}") from error
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Requests that are left when the drain time is over end with an error instead of a cut connection.
        self._state.stop()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(128 + sig)
        self.should_exit = True
