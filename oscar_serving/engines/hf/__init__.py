"""The embedded engine: any Hugging Face decoder model on an OSCAR cache."""

from oscar_serving.engines.hf.options import EngineOptions, EngineStats, TierStats
from oscar_serving.engines.hf.params import RequestError, RequestOutput, SamplingParams, TokenLogprob

__all__ = [
    "EngineOptions",
    "EngineStats",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "TierStats",
    "TokenLogprob",
]
