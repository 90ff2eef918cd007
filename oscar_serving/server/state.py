"""What the routes share."""

from __future__ import annotations

import asyncio
import time

from starlette.requests import Request

from oscar_serving.engines.hf import Engine
from oscar_serving.server.errors import ApiError
from oscar_serving.server.generation import Choice, Generation
from oscar_serving.server.metrics import RequestMetrics
from oscar_serving.server.prompts import PromptBuilder
from oscar_serving.server.responses import PromptTokensDetails, Usage
from oscar_serving.server.settings import ServerSettings
from oscar_serving.server.tokens import TokenTable


class ServerState:
    """One engine and what is built around it.

    Attributes
    ----------
    ready
        Set once a real request has gone through the engine.
    names
        Model names that clients may ask for; the first is reported.
    """

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.names = settings.served_model_names or (engine.model_id,)
        self.prompts = PromptBuilder(engine.tokenizer, settings.chat_template)
        self.table = TokenTable(engine.tokenizer)
        self.metrics = RequestMetrics(self.names[0], engine.stats)
        self.created = int(time.time())
        self.ready = False
        self._stopping: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, request: Request) -> ServerState:
        """The state of the application that handles ``request``."""
        state: ServerState = request.app.state.oscar
        return state

    def stop(self) -> asyncio.Task[None]:
        """Stop the engine, once however often asked; running requests may finish within the drain time."""
        if self._stopping is None:
            self.ready = False
            work = asyncio.to_thread(self.engine.shutdown, True, float(self.settings.drain_timeout))
            self._stopping = asyncio.create_task(work)
        return self._stopping

    def model_name(self, asked: str | None) -> str:
        """The name to answer with.

        Raises
        ------
        ApiError
            404 where the model is not served here.
        """
        if asked is None:
            return self.names[0]
        if asked in self.names:
            return asked
        served = ", ".join(map(repr, self.names))
        raise ApiError(404, f"model {asked!r} is not served here: {served} is", param="model", code="model_not_found")

    def generate(self, request_id: str, choices: list[Choice]) -> Generation:
        """Start the choices in the engine."""
        generation = Generation(self.engine, request_id, choices, self.metrics)
        generation.start()
        return generation

    def tool_parser(self) -> str:
        """How tool calls are read: ``hermes`` or ``none``."""
        if self.settings.tool_parser != "auto":
            return self.settings.tool_parser
        return "hermes" if "<tool_call>" in (self.prompts.chat_template or "") else "none"


def usage(choices: list[Choice], n: int) -> Usage:
    """Tokens of a request whose choices are grouped by prompt, ``n`` each."""
    prompts = choices[::n]
    prompt_tokens = sum(len(choice.prompt) for choice in prompts)
    completion_tokens = sum(choice.generated_tokens for choice in choices)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(choice.cached_tokens for choice in prompts)),
    )
