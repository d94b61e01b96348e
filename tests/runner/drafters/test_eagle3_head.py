"""The EAGLE-3 head alone: its arithmetic against plain loops."""

from __future__ import annotations

import math
from typing import Any

import drafting
import pytest
import tiny
import torch

from cb_engine.attention.interface import bind
from cb_engine.runner.drafters.eagle3_head import Eagle3Head
from cb_engine.runner.probe import PlainAttention

HEADS, KV_HEADS, DIM, WIDTH, EPS = 4, 2, 8, 32, 1e-6  # as `drafting.head_config` has them


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny.make_model("llama")


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def rotated(x: torch.Tensor, position: int) -> torch.Tensor:
    """One head's vector of `DIM`: pair i, halves apart, turned by position / 10000^(2i / DIM)."""
    out = x.clone()
    for i in range(DIM // 2):
        angle = position / 10000 ** (2 * i / DIM)
        a, b = x[i], x[i + DIM // 2]
        out[i], out[i + DIM // 2] = a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle)
    return out


def reference_pass(
    head: Eagle3Head, embeds: torch.Tensor, hidden: torch.Tensor, positions: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a pass returns, and its logits, in double precision, row by row."""
    w = {name: tensor.double() for name, tensor in head.state_dict().items()}
    config, layer = head.config, "midlayer."
    normed = rms(hidden, w[layer + "hidden_norm.weight"])
    x = torch.cat([rms(embeds, w[layer + "input_layernorm.weight"]), normed], -1)
    q, k, v = (x @ w[f"{layer}self_attn.{n}_proj.weight"].T for n in "qkv")
    rows = []
    for i in range(len(x)):
        heads = []
        for h in range(HEADS):
            g = slice(h // (HEADS // KV_HEADS) * DIM, (h // (HEADS // KV_HEADS) + 1) * DIM)
            own = rotated(q[i, h * DIM : (h + 1) * DIM], positions[i])
            scores = torch.stack([own @ rotated(k[j, g], positions[j]) / math.sqrt(DIM) for j in range(i + 1)])
            heads.append(scores.softmax(0) @ v[: i + 1, g])
        rows.append(torch.cat(heads))
    h1 = (normed if config.norm_before_residual else hidden) + torch.stack(rows) @ w[
        layer + "self_attn.o_proj.weight"
    ].T
    y = rms(h1, w[layer + "post_attention_layernorm.weight"])
    gate, up = (y @ w[f"{layer}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
    h2 = h1 + (torch.nn.functional.silu(gate) * up) @ w[layer + "mlp.down_proj.weight"].T
    final = rms(h2, w["norm.weight"])
    return final if config.norm_output else h2, final @ w["lm_head.weight"].T


def reference_fuse(head: Eagle3Head, states: list[torch.Tensor]) -> torch.Tensor:
    w = {name: tensor.double() for name, tensor in head.state_dict().items()}
    if head.config.fc_norm:
        states = [rms(state, w[f"fc_norm.{i}.weight"]) for i, state in enumerate(states)]
    joined = torch.cat(states, -1)
    if head.config.norm_before_fc:
        joined = rms(joined, w["input_norm.weight"])
    return joined @ w["fc.weight"].T if head.config.use_aux_hidden_state else joined


@torch.no_grad()
@pytest.mark.parametrize("variant", drafting.HEAD_VARIANTS)
def test_two_passes_against_plain_loops(target: Any, variant: str) -> None:
    head = drafting.make_head(target, draft_vocab_size=20, **drafting.HEAD_VARIANTS[variant])
    states = [torch.randn(5, WIDTH, dtype=torch.float64) for _ in head.config.aux_layer_ids]
    ids = torch.randint(0, tiny.VOCAB, (5,))
    embeds = target.get_input_embeddings().weight[ids]
    assert torch.equal(head.embed(ids), embeds)
    hidden = head.fuse(torch.cat(states, -1).float().unsqueeze(0))
    expected = reference_fuse(head, states)
    torch.testing.assert_close(hidden[0].double(), expected, rtol=1e-4, atol=1e-5)
    for first in (0, 3):
        positions = list(range(first, first + 5))
        with bind(PlainAttention()):
            hidden = head(embeds.unsqueeze(0), hidden, torch.tensor([positions]))
        expected, logits = reference_pass(head, embeds.double(), expected, positions)
        torch.testing.assert_close(hidden[0].double(), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(head.logits(hidden[0]).double(), logits, rtol=1e-4, atol=1e-4)


def test_frequencies_stay_exact_when_the_head_is_cast(target: Any) -> None:
    head = drafting.make_head(target)
    exact = head.midlayer.self_attn.rotary_emb.inv_freq.clone()
    head = head.to(torch.bfloat16)
    assert head.midlayer.self_attn.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(head.midlayer.self_attn.rotary_emb.inv_freq, exact)
    assert target.get_input_embeddings().weight.dtype == torch.float32, "the target's modules are left alone"


def test_a_head_narrower_than_the_target_needs_embeddings_of_its_own(target: Any) -> None:
    config = drafting.head_config(hidden_size=16)
    with pytest.raises(ValueError, match=r"needs embed_tokens.weight of its own"):
        Eagle3Head(config, target_embeddings=target.get_input_embeddings())
    with pytest.raises(ValueError, match=r"needs lm_head.weight of its own"):
        Eagle3Head(config, target_lm_head=target.get_output_embeddings())
