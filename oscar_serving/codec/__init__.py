"""The codecs: the only place that knows what a code means and how many bytes it takes."""

from oscar_serving.codec.affine import Quantized, dequantize, quantize
from oscar_serving.codec.layout import PageLayout, PageViews
from oscar_serving.codec.packing import pack, unpack

__all__ = ["PageLayout", "PageViews", "Quantized", "dequantize", "pack", "quantize", "unpack"]
