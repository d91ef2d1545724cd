"""Horovod's classes for the type in which tensors are sent."""

from __future__ import annotations

from typing import Any, ClassVar

import tensorflow as tf

from hvpipe.engine.engine import Compression as EngineCompression


class Compressor:
    """Converts a tensor for sending, and back. Subclass it for a conversion of your own."""

    name: ClassVar[EngineCompression] = None
    """The engine's name of this conversion; None if the engine does not know it."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor to send, and what `decompress` needs."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor in its own type."""
        return tensor


class NoneCompressor(Compressor):
    """Sends tensors as they are."""


class _HalfCompressor(Compressor):
    _dtype: ClassVar[Any]

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        converted = tf.cast(tensor, cls._dtype) if tensor.dtype.is_floating else tensor
        return converted, tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tf.cast(tensor, ctx) if ctx.is_floating else tensor


class FP16Compressor(_HalfCompressor):
    """Sends floating-point tensors as float16."""

    name = "fp16"
    _dtype = tf.float16


class BF16Compressor(_HalfCompressor):
    """Sends floating-point tensors as bfloat16."""

    name = "bf16"
    _dtype = tf.bfloat16


class Compression:
    """The conversions to choose from: `none`, `fp16`, `bf16`."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


EVERY_COMPRESSOR: tuple[type[Compressor], ...] = (Compression.none, Compression.fp16, Compression.bf16)
COMPRESSORS = {kind.name: kind for kind in EVERY_COMPRESSOR}
