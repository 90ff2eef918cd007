"""The embedded engine: requests in, text out, an OSCAR cache between."""

from __future__ import annotations

import copy
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from oscar_serving.attention import AttentionBackend, select_backend
from oscar_serving.calibration import Artifact
from oscar_serving.engines.apple.paged import SrftBackend
from oscar_serving.engines.hf.core import Delivery, EngineCore
from oscar_serving.engines.hf.detokenizer import IncrementalDecoder, StopStrings
from oscar_serving.engines.hf.memory import allocate_stores, choose_artifact
from oscar_serving.engines.hf.model import LoadedModel, load_model, pick_device, pick_dtype
from oscar_serving.engines.hf.options import EngineOptions, EngineStats
from oscar_serving.engines.hf.params import RequestError, RequestOutput, SamplingParams
from oscar_serving.engines.hf.runner import Runner
from oscar_serving.engines.hf.sampling import SamplerState
from oscar_serving.engines.hf.scheduler import Scheduler
from oscar_serving.engines.hf.sequence import Sequence

log = logging.getLogger(__name__)

#: How long :meth:`Engine.warmup` waits for its request.
WARMUP_SECONDS = 600.0


class Engine:
    """Continuous batching of requests over one model and one cache.

    :meth:`submit`, :meth:`abort` and :meth:`stats` may be called from any thread, also from ``on_output``.
    The computing is done either by the worker thread between :meth:`start` and :meth:`shutdown`, or by
    whoever calls :meth:`step`.

    Attributes
    ----------
    tokenizer, model_id, max_model_len
        Of the model served.
    config, artifact
        Of the cache; both ``None`` for the plain BF16 baseline and the SRFT codec.
    device, backend
        Where the model runs, and the attention backend that serves it.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        tokenizer: Any,
        options: EngineOptions,
        *,
        artifact: Artifact | None,
        model_id: str = "model",
    ) -> None:
        self.options = options
        self.model_id = options.model_id or model_id
        self.tokenizer = tokenizer
        self.artifact = artifact
        self.loaded = loaded
        self.max_model_len = loaded.max_model_len
        self.vocab_size = loaded.vocab_size
        self.device: torch.device = loaded.model.device
        self.backend: AttentionBackend | SrftBackend = (
            SrftBackend(self.device) if options.srft else select_backend(self.device)
        )
        self.stores = allocate_stores(loaded, artifact, options, device=self.device)
        self.config = self.stores.config if artifact is not None else None
        self.eos_token_ids = _eos_token_ids(loaded, tokenizer)
        runner = Runner(loaded, self.stores.layers, self.backend, raw_prefill=self.stores.config.prefill_mode == "raw")
        scheduler = Scheduler(
            self.stores.pool,
            max_num_seqs=options.max_num_seqs,
            max_batched_tokens=options.max_batched_tokens,
            page_size=self.stores.config.page_size,
            prefix_caching=options.prefix_caching,
        )
        self.core = EngineCore(self.stores, runner, scheduler, eos=self.eos_token_ids)
        self._decoding_tokenizer = copy.deepcopy(tokenizer)  # encoding in another thread may alter a tokenizer
        self._seeds = random.Random(options.seed)
        self._inbox = threading.Condition()  # guards the fields below; held for moments only
        self._new: deque[Sequence] = deque()
        self._aborts: set[str] = set()
        self._live: set[str] = set()
        self._arrivals = 0
        self._closed = False
        self._worker: threading.Thread | None = None
        self._stopping = False

    @classmethod
    def load(cls, model: Path | str, options: EngineOptions) -> Engine:
        """Load a model folder with its tokenizer, and the artifact that belongs to it.

        Raises
        ------
        ValueError
            ``ModelError``, ``ConfigError`` or ``ArtifactError``: what cannot be served, in one line.
        """
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        path = Path(model)
        device = pick_device(options.device)
        loaded = load_model(
            path, device=device, dtype=pick_dtype(options.dtype, device), max_model_len=options.max_model_len
        )
        tokenizer = AutoTokenizer.from_pretrained(path)
        return cls(loaded, tokenizer, options, artifact=choose_artifact(path, loaded, options), model_id=path.name)

    def submit(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        on_output: Callable[[RequestOutput], None],
    ) -> None:
        """Queue a request; ``on_output`` is called from the computing thread until ``finish_reason`` is set.

        Raises
        ------
        RequestError
            At once, when the request cannot be served as asked; nothing is computed and ``on_output`` is
            never called.
        """
        max_tokens = self._check(prompt, params)
        with self._inbox:
            self._check_open(request_id)
            seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        sequence = Sequence(
            request_id,
            len(prompt),
            max_tokens,
            params,
            on_output,
            SamplerState(params, prompt, vocab_size=self.vocab_size, seed=seed),
            IncrementalDecoder(self._decoding_tokenizer, prompt, skip_special_tokens=params.skip_special_tokens),
            StopStrings(params.stop),
            list(prompt),
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
        )
        with self._inbox:
            self._check_open(request_id)
            sequence.arrival, self._arrivals = self._arrivals, self._arrivals + 1
            self._live.add(request_id)
            self._new.append(sequence)
            self._inbox.notify_all()

    def abort(self, request_id: str) -> None:
        """End a request after the step in progress (output ``abort``); an unknown id is ignored."""
        with self._inbox:
            if request_id in self._live:
                self._aborts.add(request_id)
                self._inbox.notify_all()

    def step(self) -> bool:
        """Compute one step and deliver its outputs; whether there was anything to do."""
        deliveries = self._take_inbox() + self.core.step()
        for sequence, output in deliveries:
            self._deliver(sequence, output)
        return bool(deliveries) or len(self.core.scheduler) > 0

    def start(self) -> None:
        """Start the worker thread."""
        with self._inbox:
            if self._worker is not None:
                raise RuntimeError("the engine is already started")
            if self._closed:
                raise RuntimeError("the engine has been shut down")
            self._worker = threading.Thread(target=self._work, name="oscar-engine", daemon=True)
        self._worker.start()

    def shutdown(self, drain: bool = True, timeout: float = 60.0) -> None:
        """Refuse new requests, ``drain`` the others for up to ``timeout`` seconds, abort the rest, stop."""
        deadline = time.monotonic() + timeout
        with self._inbox:
            self._closed = True
            worker, self._worker = self._worker, None
            if worker is not None and drain:
                self._inbox.wait_for(lambda: not self._live, max(0.0, deadline - time.monotonic()))
        while worker is None and drain and self._live and time.monotonic() < deadline:
            self.step()
        with self._inbox:
            self._aborts |= self._live
            self._stopping = True
            self._inbox.notify_all()
        if worker is not None and worker is not threading.current_thread():
            worker.join()
        while self._live:  # without a worker the caller's thread does what is left
            self.step()

    def warmup(self) -> None:
        """Run one real request through every kernel: prefill, INT2 history and decode.

        Raises
        ------
        RuntimeError
            When it does not end as it should; the engine must then not take requests.
        """
        config = self.stores.config
        windows = 0 if self.stores.plain else config.sink + config.recent
        length = max(1, min(windows + 2 * config.page_size, self.max_model_len - 4))
        prompt = [token % self.vocab_size for token in range(length)]
        done = threading.Event()
        outputs: list[RequestOutput] = []

        def on_output(output: RequestOutput) -> None:
            outputs.append(output)
            if output.finish_reason is not None:
                done.set()

        steps = min(3, self.max_model_len - length)
        with self.core.uncounted():
            self.submit(
                f"warmup-{id(done)}",
                prompt,
                SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True),
                on_output,
            )
            if self._worker is None:
                while not done.is_set():
                    self.step()
            elif not done.wait(WARMUP_SECONDS):
                raise RuntimeError(f"the first request did not finish within {WARMUP_SECONDS:g} seconds")
        if outputs[-1].finish_reason != "length":
            raise RuntimeError(f"the first request failed: {outputs[-1].error}")

    def stats(self) -> EngineStats:
        """A consistent snapshot."""
        return self.core.stats(queued=len(self._new))

    def _check(self, prompt: list[int], params: SamplingParams) -> int:
        """Tokens to generate, after checking everything that depends on the request alone."""
        if not prompt:
            raise RequestError("the prompt is empty: at least one token is needed", "empty_prompt", param="prompt")
        for token in prompt:
            if not isinstance(token, int) or not 0 <= token < self.vocab_size:
                raise RequestError(
                    f"prompt has token {token!r}: allowed is 0 to {self.vocab_size - 1}",
                    "invalid_token",
                    param="prompt",
                )
        for name, tokens in (
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", tuple(params.logit_bias)),
        ):
            for token in tokens:
                if token >= self.vocab_size:
                    raise RequestError(
                        f"{name} has token {token}: allowed is 0 to {self.vocab_size - 1}",
                        "invalid_parameter",
                        param=name,
                    )
        room = self.max_model_len - len(prompt)
        asked = params.max_tokens
        if room < (1 if asked is None else asked):
            output = "" if asked is None else f" and {asked} for the output"
            raise RequestError(
                f"the context is {self.max_model_len} tokens, the prompt has {len(prompt)}{output}; shorten "
                f"{'the prompt' if asked is None else 'one of them'}",
                "context_length_exceeded",
                param="prompt" if room <= 0 or asked is None else "max_tokens",
            )
        return room if asked is None else asked

    def _check_open(self, request_id: str) -> None:
        if self._closed:
            raise RequestError("the server is shutting down", "shutting_down")
        if request_id in self._live:
            raise RequestError(f"request id {request_id!r} is already in use", "duplicate_request")
        if len(self._live) >= self.options.max_num_seqs + self.options.max_waiting:
            raise RequestError(
                f"{len(self._live)} requests are running or waiting, which is the limit; try again later",
                "queue_full",
            )

    def _take_inbox(self) -> list[Delivery]:
        """Move what came in since the last step to the scheduler."""
        with self._inbox:
            new, aborts = list(self._new), set(self._aborts)
            self._new.clear()
            self._aborts.clear()
        for sequence in new:
            self.core.add(sequence)
        ended = [sequence for sequence in self.core.scheduler if sequence.request_id in aborts]
        return [self.core.finish(sequence, "abort") for sequence in ended]

    def _deliver(self, sequence: Sequence, output: RequestOutput) -> None:
        ended = output.finish_reason is not None
        try:
            sequence.on_output(output)
        except Exception:
            log.exception("on_output of request %s raised; the request is aborted", sequence.request_id)
            self.abort(sequence.request_id)
        if ended:
            with self._inbox:
                self._live.discard(sequence.request_id)
                self._aborts.discard(sequence.request_id)
                self._inbox.notify_all()

    def _work(self) -> None:
        while True:
            try:
                busy = self.step()
            except Exception:
                log.exception("the engine's step raised")
                busy = len(self.core.scheduler) > 0  # their answers are still owed
                time.sleep(0.1)  # should it raise again
            with self._inbox:
                if not busy and not self._new and not self._aborts:
                    if self._stopping and not self._live:
                        return
                    self._inbox.wait_for(lambda: self._new or self._aborts or self._stopping)


def _eos_token_ids(loaded: LoadedModel, tokenizer: Any) -> frozenset[int]:
    """End-of-sequence tokens of the generation configuration and of the tokenizer."""
    ids: set[int] = set()
    for value in (loaded.model.generation_config.eos_token_id, tokenizer.eos_token_id):
        ids.update([value] if isinstance(value, int) else value or ())
    return frozenset(ids)
