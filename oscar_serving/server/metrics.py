"""Prometheus metrics: vLLM's names, for its dashboards and gateways, and ``oscar_`` ones for the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from oscar_serving.engines.hf import EngineStats
from oscar_serving.version import __version__

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_SECONDS_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576)


class RequestMetrics:
    """What is counted as requests pass, beside what the engine reports of itself when scraped.

    Parameters
    ----------
    model
        Value of the label ``model_name``.
    stats
        Gives the engine's snapshot.
    """

    def __init__(self, model: str, stats: Callable[[], EngineStats]) -> None:
        self._model = model
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(model, stats))
        self._success = Counter(
            "vllm:request_success",
            "Requests finished, by reason.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        for reason in ("stop", "length", "abort", "error"):
            self._success.labels(model, reason)
        self._first_token = self._histogram("time_to_first_token_seconds", "Wait for the first token.", _SECONDS)
        self._latency = self._histogram("e2e_request_latency_seconds", "Time of a whole request.", _SECONDS)
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time of each token after the first.",
            _SECONDS_PER_TOKEN,
        )
        self._prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._generated = self._histogram("request_generation_tokens", "Generated tokens of a request.", _TOKENS)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"vllm:{name}", text, ["model_name"], buckets=buckets, registry=self._registry)
        return histogram.labels(self._model)

    def first_token(self, seconds: float) -> None:
        """A request's first token came after so long."""
        self._first_token.observe(seconds)

    def finished(
        self,
        reason: str,
        seconds: float,
        since_first: float | None,
        prompt_tokens: int,
        generated_tokens: int,
    ) -> None:
        """A request ended by itself; ``since_first`` is the time from its first token on."""
        self._success.labels(self._model, reason).inc()
        self._latency.observe(seconds)
        self._prompt.observe(prompt_tokens)
        self._generated.observe(generated_tokens)
        if since_first is not None and generated_tokens > 1:
            self._per_token.observe(since_first / (generated_tokens - 1))

    def aborted(self, count: int) -> None:
        """So many requests were given up by their clients."""
        self._success.labels(self._model, "abort").inc(count)

    def render(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """Reads the engine when it is scraped, so that gauges are never stale."""

    def __init__(self, model: str, stats: Callable[[], EngineStats]) -> None:
        self._model = model
        self._stats = stats

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not ask the engine."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """The metrics of one snapshot."""
        stats = self._stats()
        gauges = {
            "vllm:num_requests_running": ("Requests being computed.", stats.running),
            "vllm:num_requests_waiting": ("Requests waiting for their turn.", stats.waiting),
            "vllm:kv_cache_usage_perc": (
                "Share of the INT2 pages held by running requests.",
                stats.cache_usage,
            ),
            "oscar_capacity_tokens": ("Tokens that fit in the INT2 pages.", stats.capacity_tokens),
            "oscar_bytes_per_token": (
                "Bytes of a token in the INT2 pages, all layers.",
                stats.bytes_per_token,
            ),
            "oscar_cached_bytes": ("Bytes of the pages in use, both tiers.", stats.cached_bytes),
            "oscar_bf16_bytes": ("Bytes that a BF16 cache would take for the same tokens.", stats.bf16_bytes),
            "oscar_saved_bytes": ("Difference of the two.", stats.saved_bytes),
        }
        counters = {
            "vllm:prompt_tokens": ("Prompt tokens submitted.", stats.prompt_tokens),
            "vllm:generation_tokens": ("Tokens sampled.", stats.generated_tokens),
            "vllm:prefix_cache_queries": (
                "Prompt tokens looked up in the prefix cache.",
                stats.prompt_tokens,
            ),
            "vllm:prefix_cache_hits": (
                "Prompt tokens taken from the prefix cache.",
                stats.cached_prompt_tokens,
            ),
            "vllm:num_preemptions": ("Requests put back because the pages ran out.", stats.preemptions),
            "oscar_prefix_hits": ("Requests that found a beginning in the prefix cache.", stats.prefix_hits),
            "oscar_prefix_hit_tokens": ("Tokens found in the prefix cache.", stats.prefix_hit_tokens),
            "oscar_evictions": ("Cached pages given to other tokens.", stats.evictions),
            "oscar_requests_failed": ("Requests ended by an error.", stats.requests_failed),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter
        tiers = {"int2": stats.quantized, "window": stats.windows}
        for name, text, attribute in (
            ("oscar_pages", "Pages of a tier.", "total"),
            ("oscar_pages_in_use", "Pages held by running requests.", "used"),
            ("oscar_pages_cached", "Pages that only the prefix cache holds.", "cached"),
            ("oscar_tier_bytes", "Memory of a tier.", "bytes"),
        ):
            gauge = GaugeMetricFamily(name, text, labels=["model_name", "tier"])
            for tier, pages in tiers.items():
                gauge.add_metric([self._model, tier], getattr(pages, attribute))
            yield gauge
        info = InfoMetricFamily("oscar_build", "Version of oscar-serving.")
        info.add_metric([], {"version": __version__})
        yield info
