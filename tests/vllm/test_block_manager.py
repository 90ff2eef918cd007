"""Blocks of the window store under vLLM's real KV-cache manager and coordinator."""

from __future__ import annotations

import random

import pytest
from block_model import INT2, WINDOW, Simulator
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


def drain(sim: Simulator) -> None:
    for name in list(sim.running):
        sim.finish(name)
    sim.check_references()


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**32),
    blocks=st.integers(70, 400),
    sink=st.sampled_from([0, 16, 20, 64]),
    recent=st.sampled_from([1, 16, 100, 256]),
    chunk=st.sampled_from([64, 200, 512, 2048]),
    exact=st.booleans(),
    drafts=st.sampled_from([0, 0, 3]),
)
def test_random_traffic(seed: int, blocks: int, sink: int, recent: int, chunk: int, exact: bool, drafts: int) -> None:
    """Hits, shared prefixes, conversations, preemption, abort, rejected drafts: every read finds its own token."""
    rng = random.Random(seed)
    sim = Simulator(blocks, sink=sink, recent=recent, exact=exact, chunk=chunk)
    history: list[list[int]] = [[rng.randrange(3) for _ in range(rng.randrange(1, 900))] for _ in range(3)]
    for i in range(40):
        action = rng.random()
        if action < 0.3 and len(sim.waiting) < 4:
            base = rng.choice(history)
            cut = rng.choice([len(base), rng.randrange(len(base) + 1)])
            tail = [rng.randrange(3) for _ in range(rng.randrange(1, 300))]
            sim.submit(str(i), [*base[:cut], *tail][-1500:] if cut == 0 else [*base[:cut], *tail][:1500])
        elif action < 0.4 and sim.running:
            history.append(sim.finish(rng.choice(list(sim.running))))
        elif action < 0.45 and sim.running:
            sim.preempt(rng.choice(list(sim.running)))
        elif action < 0.6 and sim.waiting:
            sim.admit()
        elif sim.running:
            for name in list(sim.running):
                for _ in range(rng.choice([1, 1, 20])):
                    if name in sim.running:
                        sim.advance(name, rng, drafts)
        sim.check_references()
    drain(sim)


def run_to(sim: Simulator, name: str, tokens: list[int], answer: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    request = sim.submit(name, tokens)
    assert sim.admit()
    while request.num_tokens < len(tokens) + answer:
        sim.advance(name, rng)
    return sim.finish(name)


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(length)]


@pytest.mark.parametrize("answer", [1, 130, 400, 1000])
def test_a_second_turn_hits_the_first_answer(answer: int) -> None:
    sim = Simulator(600, sink=64, recent=256)
    conversation = run_to(sim, "first", prompt(1000, 1), answer)
    written = len(conversation) - 1  # the last token was sampled, not computed
    run_to(sim, "second", [*conversation, *prompt(50, 2)], 3)
    assert sim.hits[-1][0] == written // 128 * 128


def test_a_shared_prefix_is_kept_from_the_second_request_on() -> None:
    sim = Simulator(600, sink=64, recent=256, chunk=4096)
    system = prompt(1280, 3)
    for i in range(3):
        run_to(sim, str(i), [*system, *prompt(1000, 10 + i)], 2, seed=i)
    # The first does not know, the second finds the pages but not the windows, the third finds both.
    assert [hit for hit, _ in sim.hits] == [0, 0, 1280]


def test_soft_mode_takes_the_hit_at_once() -> None:
    sim = Simulator(600, sink=64, recent=256, exact=False, chunk=4096)
    system = prompt(1280, 3)
    for i in range(2):
        run_to(sim, str(i), [*system, *prompt(1000, 10 + i)], 2, seed=i)
    assert [hit for hit, _ in sim.hits] == [0, 1280]
    assert sim.reads_without_window > 0


def test_a_long_chunk_needs_few_window_blocks() -> None:
    sim = Simulator(700, sink=64, recent=256, chunk=16384)
    sim.submit("long", prompt(30000, 4))
    assert sim.admit()
    sim.advance("long", random.Random(0))
    assert sim.peak <= sim.windows.kv_cache_spec.max_blocks_per_request == 48
    drain(sim)


def test_a_thousand_steps_hold_the_window_and_no_more() -> None:
    sim = Simulator(300, sink=64, recent=256)
    rng = random.Random(5)
    sim.submit("r", prompt(700, 5))
    assert sim.admit()
    for _ in range(1000):
        sim.advance("r", rng)
    held = [b for b in sim.windows.req_to_blocks["r"] if not b.is_null]
    assert len(held) <= 64 // 16 + 256 // 16 + 1
    # Of the blocks that left the window only those of the prompt's end and of the last hit boundary are still findable.
    findable = [b for b in sim.pool.blocks if b.block_hash is not None and sim.pool.get_cached_block]
    windows = [b for b in findable if b.block_hash[-4:] == WINDOW.to_bytes(4, "big")]
    pages = [b for b in findable if b.block_hash[-4:] == INT2.to_bytes(4, "big")]
    assert len(pages) == 1700 // 128
    assert len(windows) <= 4 + 2 * (256 // 16) + 9
    drain(sim)


def test_a_full_pool_with_many_prompts_loses_nothing() -> None:
    """48 prompts on a pool that holds a few: evictions and preemptions, and every read still finds its own token."""
    sim = Simulator(130, sink=64, recent=256, chunk=512)
    rng = random.Random(6)
    for i in range(48):
        sim.submit(str(i), [*prompt(256, 100 + i % 5), *prompt(rng.randrange(20, 600), i)])
    done = 0
    for _ in range(3000):
        if sim.waiting and rng.random() < 0.5:
            sim.admit()
        for name in list(sim.running):
            if name not in sim.running:
                continue
            sim.advance(name, rng)
            state = sim.running.get(name)
            if state and len(state.request.output_token_ids) > 40:
                sim.finish(name)
                done += 1
        if done == 48:
            break
    assert done == 48
    drain(sim)
