"""Candidates are what they claim; the choice is the one with the least error of the attention output."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oscar_serving.attention.reference import reference_attention
from oscar_serving.attention.spec import AttentionSpec
from oscar_serving.calibration.candidates import k_candidates, v_candidates
from oscar_serving.calibration.capture import LayerCall
from oscar_serving.calibration.errors import OutputErrors
from oscar_serving.calibration.moments import Moments
from oscar_serving.calibration.recipe import PRESETS, SHRINKS, Recipe, default_config
from oscar_serving.calibration.run import calibrate_model
from oscar_serving.calibration.select import LayerChoice, observe, stages
from oscar_serving.config import ConfigError, OscarConfig
from oscar_serving.rotation import LayerTransform, check_orthogonal
from oscar_serving.rotation.spectral import check_inverse
from tests.calibration.tiny import CONFIGS, tiny_model, tiny_tokens

CONFIG = OscarConfig(sink=4, recent=8, scale_dtype="float8_e4m3")
EVERY = Recipe(
    ("q", "q_read", "k", "k_read", "none"), ("scores", "proxy", "v", "v_read", "none"), ("none", "plain", "read")
)


def random_call(
    seed: int, *, heads: int = 2, ratio: int = 2, d: int = 16, tokens: int = 64, **spec: object
) -> LayerCall:
    """Correlated K and V with a mean and a few strong channels."""
    generator = torch.Generator().manual_seed(seed)
    k, v = (
        torch.randn(heads, tokens, d, generator=generator) @ torch.randn(heads, d, d, generator=generator)
        + 3 * torch.randn(heads, 1, d, generator=generator)
        for _ in range(2)
    )
    q = torch.randn(heads * ratio, tokens, d, generator=generator)
    return LayerCall(0, q, k, v, AttentionSpec(scale=d**-0.5, **spec))  # type: ignore[arg-type]


def sums(*calls: LayerCall, config: OscarConfig = CONFIG) -> Moments:
    moments = Moments.empty(calls[0].heads, calls[0].k.shape[-1])
    for call in calls:
        moments.update(call, config)
    return moments


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 99), d=st.sampled_from([16, 24, 40, 80]), ratio=st.sampled_from([1, 3]))
def test_every_candidate_leaves_attention_unchanged(seed: int, d: int, ratio: int) -> None:
    call = random_call(seed, d=d, ratio=ratio, tokens=48)
    moments = sums(call)
    exact = call.output()
    for k, v in zip(
        k_candidates(moments, EVERY, "float8_e4m3"), v_candidates(moments, EVERY, "float8_e4m3"), strict=True
    ):
        check_inverse(k.rotation, k.query, k.name)
        check_orthogonal(v.rotation, v.name, tolerance=1e-5)
        q = (call.q.unflatten(0, (2, ratio)) @ k.query[:, None]).flatten(0, 1)
        rotated = LayerCall(0, q, k.apply(call.k), v.apply(call.v), call.spec)
        back = rotated.output().unflatten(0, (2, ratio)) @ v.rotation.mT[:, None] + v.mean[:, None, None]
        torch.testing.assert_close(back.flatten(0, 1), exact, rtol=1e-3, atol=1e-3)


def test_targets_are_diagonal_in_their_own_eigenvectors() -> None:
    call = random_call(0)
    moments = sums(call)
    recipe = Recipe(("q", "k"), ("v", "scores"), ("plain",), use_hadamard=False, use_bit_reversal=False)
    k = call.k.double() - call.k.double().mean(1, keepdim=True)
    o = call.output().double().unflatten(0, (2, 2)).flatten(1, 2)
    q = call.q.double().unflatten(0, (2, 2)).flatten(1, 2)
    v = call.v.double() - call.v.double().mean(1, keepdim=True)
    made = [*k_candidates(moments, recipe, "float16"), *v_candidates(moments, recipe, "float16")]
    for candidate, rows in zip(made, (q, k, v, o), strict=True):
        rotated = rows @ candidate.rotation.double()
        covariance = rotated.mT @ rotated
        diagonal = covariance.diagonal(dim1=-2, dim2=-1)
        assert (covariance - torch.diag_embed(diagonal)).abs().max() < 1e-5 * diagonal.max(), candidate.name
        assert (diagonal.diff(dim=-1) <= 1e-6 * diagonal.max()).all(), candidate.name
        assert (candidate.unit == 1).all()


def test_errors_are_those_of_the_reference_attention() -> None:
    for softcap in (None, 5.0):
        call = random_call(3, softcap=softcap, sliding_window=40)
        k, v = (f(sums(call), EVERY, "float8_e4m3")[-1] for f in (k_candidates, v_candidates))
        measured = OutputErrors(call, CONFIG, 1000)
        exact = call.output().double()
        q, keys, values = (x.transpose(0, 1) for x in (call.q, call.k, call.v))
        for which, bits, found in (("k", 2, measured.of_k([k], [0.7], 2)), ("v", 4, measured.of_v([v], [0.7], 4))):
            candidate = {"k": k, "v": v}[which]
            query = {"q_rotation": k.query} if which == "k" else {}
            transform = replace(
                LayerTransform.plain(2, 16, rotate=False),
                **{
                    **query,
                    f"{which}_rotation": candidate.rotation,
                    f"{which}_mean": candidate.mean,
                    f"{which}_shrink": torch.full((2,), 0.7),
                    f"{which}_unit": candidate.unit,
                },
            )
            config = CONFIG.with_(window_dtype="float32", **{f"{which}_bits": bits})
            full = reference_with_one_quantized(q, keys, values, transform, config, call.spec, which)
            error = (full.transpose(0, 1) - exact)[:, measured.queries].square().unflatten(0, (2, 2)).sum((1, 2, 3))
            torch.testing.assert_close(found[0, 0], error, rtol=1e-3, atol=1e-6)


def reference_with_one_quantized(q, k, v, transform, config, spec, which):  # type: ignore[no-untyped-def]
    """Reference attention in which only K or only V is quantized: the other's INT2 copy is made exact."""
    import oscar_serving.attention.reference as reference

    original = reference.stored

    def stored(*arguments):  # type: ignore[no-untyped-def]
        k_int, v_int, k_win, v_win = original(*arguments)
        return (k_int, v_win, k_win, v_win) if which == "k" else (k_win, v_int, k_win, v_win)

    reference.stored = stored
    try:
        return reference_attention(q, k, v, transform=transform, config=config, spec=spec).output
    finally:
        reference.stored = original


def test_the_least_error_is_chosen_for_each_head() -> None:
    calls = [random_call(5), random_call(5)]
    moments = sums(*calls)
    recipe = Recipe(("none", "k", "q"), ("none", "v"), ("none", "plain"))
    for per_head in (True, False):
        choice = LayerChoice(k_candidates(moments, recipe, "float8_e4m3"), v_candidates(moments, recipe, "float8_e4m3"))
        everything = list(choice.k)
        for stage in stages(recipe, CONFIG):
            observe(choice, calls[1], CONFIG, stage)
            if stage == "rotations":
                choice.keep_best(CONFIG, per_head=per_head)
            else:
                choice.keep_clips(CONFIG, per_head=per_head)
        best = OutputErrors(calls[1], CONFIG, 128).of_k(everything, SHRINKS, 2)
        got = OutputErrors(calls[1], CONFIG, 128).of_k(choice.k, SHRINKS, 2)[0]
        index = [SHRINKS.index(round(float(s), 2)) for s in choice.chosen["k", 2].shrink]
        error = torch.stack([got[i, h] for h, i in enumerate(index)])
        if per_head:
            assert (error <= best.amin((0, 1)) * 1.1).all()  # candidates are compared on a coarser grid of clips
            assert torch.equal(error, got.amin(0))
        else:
            assert len(set(index)) == 1
            assert torch.isclose(error.sum(), got.sum(-1).min())
        assert (choice.chosen["k", 4].shrink >= choice.chosen["k", 2].shrink).all()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_tiny_model_calibrates(name: str) -> None:
    model = tiny_model(name)
    config = default_config(16).with_(group_size=None, sink=4, recent=8)
    steps: list[tuple[str, int, int]] = []
    made = calibrate_model(
        model, tiny_tokens(3, 60), recipe=PRESETS["default"], config=config, progress=lambda *s: steps.append(s)
    )
    made.validate()
    made.check_model(model.config)
    assert made.metadata["calibration"]["fit_tokens"] == 120
    assert [s for s in steps if s[1] == s[2]] == [
        ("moments", 2, 2), ("choosing rotations", 1, 1), ("choosing clips", 1, 1)
    ]  # fmt: skip
    four = made.for_bits(4, 2)
    assert four.config.k_bits == 4
    rms = made.layers[1].k_unit * 448 / 32
    assert (rms > 0).all()


@pytest.mark.parametrize("preset", PRESETS)
def test_presets(preset: str) -> None:
    model = tiny_model("llama")
    made = calibrate_model(model, tiny_tokens(2, 60), recipe=PRESETS[preset], config=CONFIG)
    transform = made.layers[0]
    shared = torch.equal(transform.k_rotation[0], transform.k_rotation[1])
    assert shared == (preset not in ("default", "oscar"))  # these two rotate head by head
    assert (made.quantile_clip == (0.96, 0.92)) == (preset == "paper")
    if preset == "paper":
        made.check_model(model.config, serving=False)
        with pytest.raises(ValueError, match="clips each row online"):
            made.check_model(model.config)
        assert (transform.k_shrink == 1).all()
        assert not transform.k_mean.any()
    if preset == "none":
        assert torch.equal(transform.v_rotation[1], torch.eye(16))


def test_odd_recipes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"k_targets=.*'qq'"):
        Recipe(k_targets=("qq",))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="means"):
        Recipe(means=())
