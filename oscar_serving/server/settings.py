"""How the server listens and what it allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ToolParser = Literal["auto", "hermes", "none"]


@dataclass(frozen=True)
class ServerSettings:
    """Options of :func:`~oscar_serving.server.lifecycle.run_server`.

    Attributes
    ----------
    host, port
        Where to listen; port 0 takes a free one.
    api_key
        Key that every request must carry; ``None`` asks for none.
    served_model_names
        Names that clients may ask for, the first one is reported; empty: the engine's own.
    model_root
        What ``/v1/models`` gives as ``root``: the folder from which benchmark clients load the tokenizer; ``None``:
        the first served name.
    chat_template
        Jinja text in place of the tokenizer's own template.
    tool_parser
        How tool calls are read out of an answer; ``auto`` takes ``hermes`` when the chat template speaks it.
    max_body_bytes
        Largest request body.
    body_timeout
        Seconds that a client gets to send its body.
    drain_timeout
        Seconds that running requests get to finish after SIGTERM.
    log_level, log_format
        Of uvicorn and of this package; ``text`` or ``json``, one line each.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    served_model_names: tuple[str, ...] = ()
    model_root: str | None = None
    chat_template: str | None = None
    tool_parser: ToolParser = "auto"
    max_body_bytes: int = 32 << 20
    body_timeout: float = 60.0
    drain_timeout: int = 60
    log_level: str = "info"
    log_format: Literal["text", "json"] = "text"

    def __post_init__(self) -> None:
        if not self.host.strip():  # which sockets take for every interface
            raise ValueError("host is empty: give an address, 127.0.0.1 for this machine or 0.0.0.0 for all")
        if self.api_key is not None and not self.api_key.strip():
            raise ValueError("api_key is empty: give a key, or leave the option out to ask for none")
