"""Device functions shared by the kernels: packed codes, stored scale and minimum."""

import triton
import triton.language as tl

#: Scores are kept in units of log2, so that ``exp2`` is one instruction.
LOG2E = tl.constexpr(1.4426950408889634)

#: One shift and one AND per plane: two codes an instruction. The 16-bit lanes of ``$8`` are two packed half-words.
_ASM_2BIT = tl.constexpr(
    "{ .reg .b32 h; shr.b32 h, $8, 8;"
    " and.b32 $0, $8, 0x00030003; and.b32 $1, h, 0x00030003;"
    " and.b32 $2, $8, 0x000c000c; and.b32 $3, h, 0x000c000c;"
    " and.b32 $4, $8, 0x00300030; and.b32 $5, h, 0x00300030;"
    " and.b32 $6, $8, 0x00c000c0; and.b32 $7, h, 0x00c000c0; }"
)
_ASM_4BIT = tl.constexpr(
    "{ .reg .b32 h; shr.b32 h, $4, 8;"
    " and.b32 $0, $4, 0x000f000f; and.b32 $1, h, 0x000f000f;"
    " and.b32 $2, $4, 0x00f000f0; and.b32 $3, h, 0x00f000f0; }"
)


@triton.jit
def plane(words, INDEX: tl.constexpr, BITS: tl.constexpr):
    """Codes of plane ``INDEX // 2``, byte ``INDEX % 2`` of int16 ``words``, as fp16 **subnormals**.

    A code masked in place in the low byte is the fp16 number ``code * 2**(BITS * (INDEX // 2) - 24)``, exactly; the
    caller folds the power of two into the other operand of the dot product.
    """
    mask: tl.constexpr = ((1 << BITS) - 1) << (BITS * (INDEX // 2))
    shifted = (words >> 8) if INDEX % 2 == 1 else words
    return (shifted & mask).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def planes(words, BITS: tl.constexpr, ASM: tl.constexpr):
    """All ``16 // BITS`` planes of int16 ``words``; see :func:`plane`. ``ASM`` works on two half-words at a time."""
    if BITS == 2:
        if ASM:
            out = tl.inline_asm_elementwise(
                _ASM_2BIT,
                "=r,=r,=r,=r,=r,=r,=r,=r,r",
                [words],
                dtype=(
                    tl.float16,
                    tl.float16,
                    tl.float16,
                    tl.float16,
                    tl.float16,
                    tl.float16,
                    tl.float16,
                    tl.float16,
                ),
                is_pure=True,
                pack=2,
            )
        else:
            out = (
                plane(words, 0, 2),
                plane(words, 1, 2),
                plane(words, 2, 2),
                plane(words, 3, 2),
                plane(words, 4, 2),
                plane(words, 5, 2),
                plane(words, 6, 2),
                plane(words, 7, 2),
            )
    elif ASM:
        out = tl.inline_asm_elementwise(
            _ASM_4BIT,
            "=r,=r,=r,=r,r",
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        out = (plane(words, 0, 4), plane(words, 1, 4), plane(words, 2, 4), plane(words, 3, 4))
    return out


@triton.jit
def e4m3_to_f32(byte):
    """FP8 e4m3 (as an integer) to float32 by shifting its bits into an fp16: works on every architecture."""
    bits = ((byte & 0x80) << 8) | ((byte & 0x7F) << 7)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def f32_to_e4m3(value):
    """Float32 within ±448 to FP8 e4m3 (as int32 0 … 255), round to nearest even, by integer arithmetic."""
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # 16384 has a unit in the last place of 2**-9, the step of e4m3's subnormals: the addition rounds
    tiny = (tl.abs(value) + 16384.0).to(tl.int32, bitcast=True) & 0xFF
    return tl.where(magnitude < 0x3C800000, tiny, normal) | ((bits >> 24) & 0x80)


@triton.jit
def split_meta(word, META8: tl.constexpr):
    """(scale, minimum) float32 of a stored pair: int32 of two fp16, or int16 of two e4m3 (in multiples of the unit)."""
    if META8:
        return e4m3_to_f32(word.to(tl.int32) & 0xFF), e4m3_to_f32((word.to(tl.int32) >> 8) & 0xFF)
    else:
        scale = word.to(tl.int16).to(tl.float16, bitcast=True)
        minimum = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True)
        return scale.to(tl.float32), minimum.to(tl.float32)
