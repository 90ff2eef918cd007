"""The embedded engine: any Hugging Face decoder model on an OSCAR cache."""

from oscar_serving.engines.hf.engine import Engine
from oscar_serving.engines.hf.model import ModelError
from oscar_serving.engines.hf.options import EngineOptions, EngineStats, TierStats
from oscar_serving.engines.hf.params import RequestError, RequestOutput, SamplingParams, TokenLogprob

__all__ = [
    "Engine",
    "EngineOptions",
    "EngineStats",
    "ModelError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "TierStats",
    "TokenLogprob",
]
