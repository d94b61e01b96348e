"""What goes out of a request: snapshots, or only what is new."""

from __future__ import annotations

from typing import Any

import byte_tokenizer
import pytest
from scripted_model import ScriptedModel

from cb_engine import Engine, GenerationOutput, SamplingParams

GREEDY = SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=0)


def outputs_of(text: str, params: SamplingParams = GREEDY, **options: Any) -> list[GenerationOutput]:
    """All outputs of one request whose model says `text`."""
    config = {"block_size": 4, **options.pop("config", {})}
    engine = Engine(
        ScriptedModel(byte_tokenizer.ids_of(text)), tokenizer=byte_tokenizer.make_tokenizer(), config=config
    )
    engine.add_request([5], params, **options)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


def joined(outputs: list[GenerationOutput]) -> dict[str, Any]:
    """What the deltas come to."""
    return {
        "prompt_ids": outputs[0].prompt_ids,
        "prompt_logprobs": outputs[0].prompt_logprobs,
        "text": "".join(o.text or "" for o in outputs),
        **{
            name: [value for o in outputs for value in getattr(o, name)]
            for name in ("generated_tokens", "logprobs", "top_logprobs", "weight_version", "timestamps")
        },
    }


def whole(output: GenerationOutput) -> dict[str, Any]:
    return {name: getattr(output, name) for name in joined([output])}


SPECULATIVE = {"speculative": {"method": "ngram", "adaptive": False, "prompt_lookup_min": 1}}


@pytest.mark.parametrize("config", [{}, SPECULATIVE], ids=["plain", "speculative"])
@pytest.mark.parametrize("stop", [(), ("two ",)], ids=["to the end", "stop string"])
def test_deltas_come_to_the_whole(stop: tuple[str, ...], config: dict[str, Any]):
    text = "one two \u00e4\u20ac three three three three"
    params = GREEDY.clone(stop=stop)
    (final,) = outputs_of(text, params, record_timestamps=True, config=config)
    deltas = outputs_of(text, params, record_timestamps=True, streaming=True, deltas=True, config=config)
    assert final.text == (text if not stop else "one ")
    together, expected = joined(deltas), whole(final)
    assert len(together.pop("timestamps")) == len(expected.pop("timestamps"))
    assert together == expected
    assert [o.is_finished() for o in deltas] == [False] * (len(deltas) - 1) + [True]
    assert deltas[-1].finish_reason == "stop"
    assert all(o.prompt_ids == [] and o.prompt_logprobs is None for o in deltas[1:])


def test_deltas_without_streaming_come_at_once():
    (only,) = outputs_of("one", streaming=False, deltas=True)
    assert (only.text, only.prompt_ids, len(only.generated_tokens)) == ("one", [5], 4)


def test_snapshots_hold_everything_each_time():
    outputs = outputs_of("one", streaming=True)
    assert [o.text for o in outputs] == ["o", "on", "one", "one"]
    assert all(o.prompt_ids == [5] for o in outputs)


def test_nothing_is_kept_of_a_request_that_has_ended():
    engine = Engine(ScriptedModel(byte_tokenizer.ids_of("one")), tokenizer=byte_tokenizer.make_tokenizer())
    for _ in range(3):
        engine.add_request([5], GREEDY, streaming=True, deltas=True)
    engine.add_request([5], GREEDY, request_id="aborted", streaming=True, deltas=True)
    engine.step()
    engine.abort("aborted")
    while engine.has_work:
        engine.step()
    assert not engine._processor._sent
    assert not engine._processor._texts
