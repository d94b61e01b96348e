"""The EAGLE-3 head (Li et al. 2025): one decoder layer over the target's hidden states.

Owns the head's arithmetic. Does not know how heads are stored (`eagle3_checkpoint.py`), nor the engine: which rows a
pass has, what its attention sees and where keys lie is up to the callable that attends.

    pass 1   hidden = fuse(target's states at p)     embeds = embed(token p + 1)
    pass s   hidden = what pass s - 1 has returned   embeds = embed(token p + s)

A pass is `forward` and then `logits`, which are those of token p + s + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from cb_engine.attention.backend import AttentionParams
from cb_engine.attention.interface import attend as attend_in_step

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, AttentionParams], torch.Tensor]

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # the others bend with the length of the batch


def _default_rope() -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0}


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """What a head is.

    Attributes:
        target_hidden_size: width of each of the target's states.
        draft_vocab_size, vocab_size: tokens the head can draft, and those of the target.
        aux_layer_ids: `output_hidden_states[i]` of the target that are fused: the input of layer i.
        rope_parameters: as in transformers: `rope_type`, `rope_theta` and what the type needs.
        norm_before_residual: the residual is the normalised hidden state.
        norm_before_fc: one norm over all fused states.
        fc_norm: a norm for each of them.
        norm_output: the next pass takes the normalised output.
        use_aux_hidden_state: False: the head takes the one state of `aux_layer_ids` as it is, without `fc`.
    """

    hidden_size: int
    target_hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    draft_vocab_size: int
    vocab_size: int
    aux_layer_ids: tuple[int, ...]
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    attention_bias: bool = False
    max_position_embeddings: int = 2048
    rope_parameters: Mapping[str, Any] = field(default_factory=_default_rope)
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    use_aux_hidden_state: bool = True

    def __post_init__(self) -> None:
        rope_type = self.rope_parameters.get("rope_type", "default")
        if rope_type not in _ROPE_TYPES:
            raise ValueError(f"an EAGLE-3 head with rope_type {rope_type!r} is not supported; known: {_ROPE_TYPES}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is no multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"draft_vocab_size={self.draft_vocab_size} exceeds vocab_size={self.vocab_size}")
        if not self.use_aux_hidden_state and self.target_hidden_size != self.hidden_size:
            raise ValueError(
                f"a head without fc needs states of its own width {self.hidden_size}, not {self.target_hidden_size}"
            )


def default_aux_layer_ids(num_layers: int) -> tuple[int, ...]:
    """A low, a middle and a high layer whose inputs are fused; a target of few layers gives the same one twice."""
    return tuple(max(0, min(i, num_layers - 1)) for i in (2, num_layers // 2, num_layers - 3))


class _Rotary(nn.Module):
    """RoPE's angles. Its frequencies stay fp32 when the module is cast: rounded ones go wrong at far positions."""

    inv_freq: torch.Tensor

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        llama = LlamaConfig(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=dict(config.rope_parameters),
        )
        self._factor = 1.0
        if config.rope_parameters.get("rope_type", "default") == "default":
            exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
            self._exact = 1.0 / (float(config.rope_parameters["rope_theta"]) ** exponents)
        else:
            self._exact, self._factor = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](llama, None)
        self.register_buffer("inv_freq", self._exact, persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> _Rotary:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.inv_freq = self._exact.to(self.inv_freq.device)
        return self

    def forward(self, position_ids: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [T, 1, head_dim] for positions [T]."""
        angles = position_ids[:, None].float() * self.inv_freq
        angles = torch.cat((angles, angles), -1).unsqueeze(1)
        return (angles.cos() * self._factor).to(dtype), (angles.sin() * self._factor).to(dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


class _Attention(nn.Module):
    """Llama's attention over packed rows of width 2 * hidden_size."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        width, dim, bias = 2 * config.hidden_size, config.head_dim, config.attention_bias
        self.q_proj = nn.Linear(width, config.num_attention_heads * dim, bias=bias)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * dim, bias=bias)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * dim, config.hidden_size, bias=bias)
        self.rotary_emb = _Rotary(config)
        self.attend: Attend = attend_in_step
        self.layer_idx = 0
        self._head_dim = dim
        self._params = AttentionParams(dim**-0.5)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            linear(x)[0].unflatten(-1, (-1, self._head_dim)) for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = self.rotary_emb(position_ids[0], q.dtype)
        out = self.attend(self.layer_idx, _rotate(q, cos, sin), _rotate(k, cos, sin), v, self._params)
        projected: torch.Tensor = self.o_proj(out.flatten(1).unsqueeze(0))
        return projected


class _MLP(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self._act = ACT2FN[config.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self._act(self.gate_proj(x)) * self.up_proj(x))
        return out


class _MidLayer(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(size, eps)
        self.hidden_norm = nn.RMSNorm(size, eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(size, eps)
        self.mlp = _MLP(config)
        self._norm_before_residual = config.norm_before_residual

    def forward(self, embeds: torch.Tensor, hidden: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        normed = self.hidden_norm(hidden)
        residual = normed if self._norm_before_residual else hidden
        x = residual + self.self_attn(torch.cat((self.input_layernorm(embeds), normed), -1), position_ids)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class _Borrowed:
    """A module that a head uses and does not own; a copy of the head uses the same one."""

    def __init__(self, module: nn.Module | None) -> None:
        self.module = module

    def __deepcopy__(self, memo: dict[int, Any]) -> _Borrowed:
        return self


class Eagle3Head(nn.Module):
    """See the module docstring. Its state_dict is a checkpoint's, in the `midlayer.*` naming, but for d2t and t2d.

    Modules of the target that it uses are none of its own: they are not in its parameters, and moving or casting the
    head leaves them alone.

    Args:
        target_ids: [draft_vocab_size] the target's token for each of the head's own; None: they are the same.
        target_embeddings: None: the head has embeddings of its own.
        target_lm_head: None: the head has one of its own; else its vocabulary is the target's.
    """

    target_ids: torch.Tensor

    def __init__(
        self,
        config: Eagle3Config,
        *,
        target_ids: torch.Tensor | None = None,
        target_embeddings: nn.Module | None = None,
        target_lm_head: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        _check_target_ids(target_ids, config)
        _check_shared(config, target_embeddings, target_lm_head)
        if target_ids is None:
            target_ids = torch.arange(config.draft_vocab_size)
        self.register_buffer("target_ids", target_ids.to(torch.int64), persistent=False)
        num_states, width = len(config.aux_layer_ids), config.target_hidden_size
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(num_states * width, config.rms_norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(nn.RMSNorm(width, config.rms_norm_eps) for _ in range(num_states))
        if config.use_aux_hidden_state:
            self.fc = nn.Linear(num_states * width, config.hidden_size, bias=False)
        self.midlayer = _MidLayer(config)
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        if target_embeddings is None:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if target_lm_head is None:
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self._embeddings, self._target_lm_head = _Borrowed(target_embeddings), _Borrowed(target_lm_head)

    def attend_with(self, attend: Attend, layer_idx: int = 0) -> None:
        """Has `attend` called in place of `cb_engine.attention.interface.attend`, as that layer."""
        self.midlayer.self_attn.attend, self.midlayer.self_attn.layer_idx = attend, layer_idx

    @property
    def borrowed(self) -> tuple[nn.Module | None, nn.Module | None]:
        """The target's embeddings and its output matrix, where the head uses them."""
        return self._embeddings.module, self._target_lm_head.module

    def borrow(self, embeddings: nn.Module | None, lm_head: nn.Module | None) -> None:
        """Takes other modules in their place, for this copy of the head alone."""
        self._embeddings, self._target_lm_head = _Borrowed(embeddings), _Borrowed(lm_head)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings of the target's token ids."""
        embeddings = self._embeddings.module
        out: torch.Tensor = self.embed_tokens(ids) if embeddings is None else embeddings(ids)
        return out

    def fuse(self, aux: torch.Tensor) -> torch.Tensor:
        """[1, T, states * target_hidden_size], the target's states in the order of `aux_layer_ids`, to [1, T, H]."""
        if self.config.norm_before_fc:
            aux = self.input_norm(aux)
        if self.config.fc_norm:
            parts = aux.chunk(len(self.fc_norm), -1)
            aux = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(aux) if self.config.use_aux_hidden_state else aux

    def forward(self, embeds: torch.Tensor, hidden: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """One pass over [1, T, H]; returns what `logits` takes, and the next pass as `hidden`."""
        out: torch.Tensor = self.midlayer(embeds, hidden, position_ids)
        return self.norm(out) if self.config.norm_output else out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Over the head's own vocabulary; `target_ids` translates it."""
        lm_head = self._target_lm_head.module or self.lm_head
        out: torch.Tensor = lm_head(hidden if self.config.norm_output else self.norm(hidden))
        return out


def _check_target_ids(target_ids: torch.Tensor | None, config: Eagle3Config) -> None:
    if target_ids is None:
        return
    if target_ids.shape != (config.draft_vocab_size,):
        raise ValueError(
            f"the draft vocabulary (d2t) has shape {tuple(target_ids.shape)}, "
            f"draft_vocab_size={config.draft_vocab_size}; they have to agree"
        )
    low, high = int(target_ids.min()), int(target_ids.max())
    if low < 0 or high >= config.vocab_size:
        raise ValueError(
            f"the draft vocabulary (d2t) maps to tokens {low} to {high}, the target has {config.vocab_size}: the head "
            "was made for another model"
        )


def _check_shared(config: Eagle3Config, embeddings: nn.Module | None, lm_head: nn.Module | None) -> None:
    """A head has to be as wide as what it shares with the target."""
    width = None if embeddings is None else weight_of(embeddings).shape[-1]
    if width not in (None, config.hidden_size):
        raise ValueError(
            f"the head has hidden_size {config.hidden_size}, the target's embeddings {width}; such a head needs "
            "embed_tokens.weight of its own"
        )
    if lm_head is None:
        return
    rows, width = weight_of(lm_head).shape
    if (rows, width) != (config.draft_vocab_size, config.hidden_size):
        raise ValueError(
            f"the target's lm_head is [{rows}, {width}], the head's would be [{config.draft_vocab_size}, "
            f"{config.hidden_size}]; such a head needs lm_head.weight of its own"
        )


def weight_of(module: nn.Module) -> torch.Tensor:
    """The matrix of an embedding or a linear layer.

    Raises:
        ValueError: it has none.
    """
    weight = module.weight
    if not isinstance(weight, torch.Tensor):
        raise ValueError(f"{type(module).__name__} has no weight to share")
    return weight
