"""Engines and requests for structured output, over single bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import byte_tokenizer
import numpy as np
import tiny
from byte_tokenizer import BOS, EOS, ids_of

from cb_engine import Engine, GenerationOutput, SamplingParams, StructuredOutput
from cb_engine.grammar.compiler import GrammarCompiler
from cb_engine.grammar.masks import MaskAsk, MaskMaker, TokenMasks
from cb_engine.grammar.state import GrammarState

VOCAB = byte_tokenizer.VOCAB + 5  # the model's is padded beyond the tokenizer's
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["x", "yy", "zzz"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@cache
def model(family: str = "llama", **changes: Any) -> Any:
    """A tiny random model whose vocabulary is that of the bytes, and some padding."""
    return tiny.make_model(family, vocab_size=VOCAB, max_position_embeddings=512, **changes)


def make_engine(target: Any = None, *, eos: int = EOS, **config: Any) -> Engine:
    """An engine over the tiny model, in blocks of four tokens."""
    return Engine(
        model() if target is None else target,
        tokenizer=byte_tokenizer.make_tokenizer(),
        config={"block_size": 4, **config},
        eos_token_id=eos,
    )


def prompts(count: int) -> list[list[int]]:
    """Different ones, of different lengths."""
    return [[BOS, *ids_of("abcdefghijklmnopqrstuvwxyz"[i % 7 : i % 7 + 3 + i % 5]), 10 + i] for i in range(count)]


def run(engine: Engine, requests: Iterable[tuple[Sequence[int], SamplingParams]]) -> list[GenerationOutput]:
    """Runs requests together to their ends, checking the books after every step; all samples of each, in order."""
    ids = [i for prompt, params in requests for i in engine.add_request(list(prompt), params)]
    ended: dict[str, GenerationOutput] = {}
    while engine.has_work:
        for output in engine.step():
            assert output.request_id not in ended
            ended[output.request_id] = output
        engine.check()
    return [ended[i] for i in ids]


def one(structured: Any, *, eos: int = EOS, target: Any = None, **params: Any) -> GenerationOutput:
    """What one request gives."""
    sampling = SamplingParams(**{"max_tokens": 60, "seed": 1, **params}, structured=structured)
    return run(make_engine(target, eos=eos), [([BOS, 9], sampling)])[0]


@cache
def compiler() -> GrammarCompiler:
    """One for all tests that look at grammars only."""
    return GrammarCompiler(byte_tokenizer.make_tokenizer(), VOCAB)


def start(
    structured: StructuredOutput | Mapping[str, Any], stops: Iterable[int] = (EOS,), eos: Iterable[int] = (EOS,)
) -> GrammarState:
    """A grammar at its start."""
    value = StructuredOutput.of(structured)
    return compiler().start(value, 1, stop_token_ids=frozenset(stops), eos_token_ids=frozenset(eos))[0]


def after(structured: Any, text: str, **ends: Any) -> GrammarState:
    """A grammar that has seen a text."""
    state = start(structured, **ends)
    for token_id in ids_of(text):
        state.advance(token_id)
    return state


def allowed(masks: TokenMasks, place: int = 0) -> list[int]:
    """The tokens that a mask lets through."""
    return np.flatnonzero(np.unpackbits(masks.bits[place], bitorder="little")).tolist()


def next_tokens(state: GrammarState) -> list[int]:
    """What may follow."""
    return allowed(MaskMaker(1).make([MaskAsk(state, 0)]))


def is_prefix(structured: Any, token_ids: Sequence[int]) -> bool:
    """Whether the grammar takes the tokens, one after the other."""
    state = start(structured)
    for token_id in token_ids:
        state.advance(token_id)
    return state.error is None


def conforms(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a value is what a schema of the few keywords used in the tests says."""
    if "enum" in schema:
        return value in schema["enum"]
    kind = schema.get("type")
    if kind == "object":
        known = schema.get("properties", {})
        return (
            isinstance(value, dict)
            and set(schema.get("required", ())) <= value.keys()
            and (schema.get("additionalProperties", True) or value.keys() <= known.keys())
            and all(conforms(item, known[key]) for key, item in value.items() if key in known)
        )
    if kind == "array":
        size = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
        return isinstance(value, list) and size and all(conforms(item, schema["items"]) for item in value)
    if kind == "string":
        size = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
        return isinstance(value, str) and size
    if kind == "integer":
        is_int = isinstance(value, int) and not isinstance(value, bool)
        return is_int and schema.get("minimum", value) <= value <= schema.get("maximum", value)
    return {"boolean": isinstance(value, bool), "null": value is None}[str(kind)]


def check_json(output: GenerationOutput, schema: Mapping[str, Any]) -> None:
    """A text that stopped is JSON of the schema; one that was cut off is the beginning of some."""
    assert output.error is None
    if output.finish_reason == "stop":
        assert conforms(json.loads(output.text or ""), schema), output.text
    else:
        assert output.finish_reason == "length"
        assert is_prefix({"json_schema": schema}, output.generated_tokens)
