"""The door, where what it lets in depends on the device."""

from __future__ import annotations

import byte_tokenizer
import pytest
import tiny

from cb_engine import Engine, SamplingParams


@pytest.mark.parametrize("static", [False, True])
def test_a_device_with_static_shapes_reports_twenty_logprobs(static: bool) -> None:
    model = tiny.make_model("llama")
    config = {"block_size": 4, "max_model_len": 16, "max_num_seqs": 1, "fake_static_device": static}
    engine = Engine(model, config=config, eos_token_id=-1)
    engine.warmup(compile_only=True)
    prompt = [1, 2, 3]
    if static:
        with pytest.raises(ValueError, match="logprobs=21 is more than the 20 a device with static shapes reports"):
            engine.add_request(prompt, SamplingParams(max_tokens=1, logprobs=21))
    wanted = 20 if static else 21
    (request_id,) = engine.add_request(prompt, SamplingParams(max_tokens=1, logprobs=wanted))
    while engine.has_work:
        for output in engine.step():
            assert output.request_id == request_id
            assert output.top_logprobs is not None
            assert len(output.top_logprobs[0]) in (wanted, wanted + 1)


def test_a_minimum_that_does_not_fit_is_refused() -> None:
    engine = Engine(tiny.make_model("llama"), config={"block_size": 4, "max_model_len": 16}, eos_token_id=-1)
    with pytest.raises(
        ValueError, match="min_tokens=14 do not fit behind the prompt of 3 tokens: the longest sequence is 16"
    ):
        engine.add_request([1, 2, 3], SamplingParams(min_tokens=14))
    engine.add_request([1, 2, 3], SamplingParams(min_tokens=13))
    (output,) = (o for _ in range(20) for o in engine.step() if o.is_finished())
    assert (len(output.generated_tokens), output.finish_reason) == (13, "length")


def test_half_a_character_is_named() -> None:
    tokenizer = byte_tokenizer.make_tokenizer()
    engine = Engine(tiny.make_model("llama"), config={"block_size": 4, "max_model_len": 16}, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="the prompt holds half of a surrogate pair at 2"):
        engine.add_request("ab\ud800")
