"""The engine over a model whose tokens, read through the paged cache, can be worked out by hand."""

from __future__ import annotations

from itertools import product

import pytest
from fake_model import FakeModel, expected

from cb_engine import Engine, EngineConfig, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


def run(engine: Engine) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while engine.has_work:
        tokens |= {output.request_id: output.generated_tokens for output in engine.step()}
        engine.check()
    return tokens


def test_three_tokens_by_hand() -> None:
    engine = Engine(FakeModel(), config={"block_size": 2})
    engine.add_request([5, 7], GREEDY.clone(max_tokens=3))
    # 5*1 + 7*2 = 19; 19 + 19*3 = 76; 76 + 76*4 = 380 = 3*97 + 89
    assert run(engine) == {"req_0": [19, 76, 89]}


@pytest.mark.parametrize("window", [None, 1, 5, 8])
@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_every_length_chunk_and_pool(window: int | None, backend: str) -> None:
    model = FakeModel(window)
    prompts = [[(7 * i + 3 * n) % 97 for i in range(n)] for n in range(1, 18)]
    answers = [expected(prompt, 12, window) for prompt in prompts]
    for block_size, chunk, num_blocks in product((1, 4), (1, 5, None), (None, 40)):
        config = EngineConfig(
            block_size=block_size, max_prefill_chunk=chunk, num_blocks=num_blocks, attention_backend=backend
        )
        engine = Engine(model, config=config, hints={"num_requests": 20})
        ids = [engine.add_request(prompt, GREEDY)[0] for prompt in prompts]
        tokens = run(engine)
        assert [tokens[i] for i in ids] == answers


def test_samples_of_one_prompt_fork_its_blocks_and_go_their_own_ways() -> None:
    """Forks share the prompt's blocks; a write of one that reached another would change that one's sum."""
    engine = Engine(FakeModel(), config={"block_size": 4})
    prompt = [11, 12, 13, 14, 15, 16]  # one full block and a half
    ids = engine.add_request(prompt, SamplingParams(n=5, temperature=30.0, seed=3, max_tokens=9))
    tokens = run(engine)
    assert len({tuple(tokens[i]) for i in ids}) == 5, "at this temperature five samples differ"
    alone = Engine(FakeModel(), config={"block_size": 4, "enable_prefix_caching": False})
    for index, sample_id in enumerate(ids):
        sampled = tokens[sample_id]
        # Greedy continuation of what was sampled: right only if the sample's own cache is right.
        for cut in (1, 4, 8):
            request = alone.add_request(prompt + sampled[:cut], GREEDY.clone(max_tokens=1))[0]
            assert run(alone)[request] == expected(prompt + sampled[:cut], 1), (index, cut)
    assert engine.stats().prefix_hit_tokens == 4 * 5, "four siblings fork all of the prompt but its last token"


def test_forks_read_their_own_tokens() -> None:
    """As above, inside one engine: logit_bias forces different first tokens, the rest is greedy."""
    engine = Engine(FakeModel(), config={"block_size": 4})
    model_free = [3, 1, 4, 1, 5, 9, 2]
    outputs: dict[str, list[int]] = {}
    engine.add_request(model_free, SamplingParams(n=6, temperature=50.0, seed=1, max_tokens=1))
    firsts = run(engine)
    for name, first in firsts.items():
        request = engine.add_request(model_free + first, GREEDY.clone(max_tokens=6), request_id=f"after-{name}")[0]
        outputs[request] = expected(model_free + first, 6)
    assert run(engine) == outputs
