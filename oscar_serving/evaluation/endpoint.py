"""Any OpenAI-compatible server as a :class:`~oscar_serving.evaluation.client.Client`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oscar_serving.evaluation.client import Completion, Messages
from oscar_serving.evaluation.model import EvaluationError

_SECONDS = 600.0


class EndpointClient:
    """A server.

    Parameters
    ----------
    url
        Base of the API, such as ``http://127.0.0.1:8000/v1``.
    model
        Served name; the first one that the server lists if ``None``.
    api_key
        Sent as bearer token.
    name
        For reports.
    tokenizer
        Needed only where the server has no ``/tokenize``.

    Raises
    ------
    EvaluationError
        The server cannot be reached, or answers an error; the message quotes it.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        api_key: str | None = None,
        name: str | None = None,
        tokenizer: Any = None,
    ) -> None:
        try:
            import httpx
        except ImportError as error:
            raise EvaluationError("evaluating an endpoint needs httpx: pip install httpx") from error

        self._transport_errors = httpx.HTTPError
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(base_url=url.rstrip("/") + "/", headers=headers, timeout=_SECONDS)
        self._tokenizer = tokenizer
        self.url = url
        self.model = model or str(self._request("GET", "models")["data"][0]["id"])
        self.name = name or f"{self.model} at {url}"

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def encode(self, text: str) -> list[int]:
        """See :class:`~oscar_serving.evaluation.client.Client`."""
        if self._tokenizer is not None:
            return list(self._tokenizer(text).input_ids)
        body = {"model": self.model, "prompt": text}
        return list(self._request("POST", "../tokenize", body)["tokens"])

    def complete(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Completion:
        """See :class:`~oscar_serving.evaluation.client.Client`."""
        answer = self.post("completions", _body(max_tokens, stop, temperature, seed) | {"prompt": _prompt(prompt)})
        return _completion(answer, str(answer["choices"][0]["text"]))

    def chat(
        self,
        messages: Messages,
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Completion:
        """See :class:`~oscar_serving.evaluation.client.Client`."""
        body = _body(max_tokens, stop, temperature, seed) | {"messages": list(messages)}
        answer = self.post("chat/completions", body)
        return _completion(answer, str(answer["choices"][0]["message"]["content"] or ""))

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """POST ``body`` for the model to a route of the API; the JSON answer."""
        return self._request("POST", path, {"model": self.model, **body})

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            response = self._http.request(method, path, json=body)
        except self._transport_errors as error:
            raise EvaluationError(f"{self.url}: {error}") from error
        if response.status_code != 200:
            raise EvaluationError(f"{self.url}: {path} answered {response.status_code}: {response.text[:300]}")
        return dict(response.json())


def _body(max_tokens: int, stop: Sequence[str], temperature: float, seed: int) -> dict[str, Any]:
    body: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    return body | ({"stop": list(stop)} if stop else {})


def _prompt(prompt: str | Sequence[int]) -> str | list[int]:
    return prompt if isinstance(prompt, str) else list(prompt)


def _completion(answer: dict[str, Any], text: str) -> Completion:
    usage = answer.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    return Completion(
        text,
        int(usage.get("completion_tokens", 0)),
        answer["choices"][0].get("finish_reason") != "length",
        int(usage.get("prompt_tokens", 0)),
        int(details.get("cached_tokens") or 0),
    )
