"""Linear layers with weights laid out for the CPU's matrix kernels.

Owns the packed copies, which live in the shadow tree and go with it: changed weights are packed anew with a new
shadow. The price is a second copy of the weights in memory.

`NativeWeight` is read by this project's own kernel, whose result for a row does not depend on the other rows. Where the
CPU has matrix tiles (AMX) it holds a second copy in oneDNN's layout, which uses them, for products of many rows: there
the tiles are several times faster, while a few rows wait for memory and are best left to the kernel.
`OneDnnLinear` takes its place where the kernel cannot be built.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from enum import IntEnum
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import nn

from cb_engine.native import build
from cb_engine.runner.fusion.programs import is_untouched

_PANEL = 32  # kPanelColumns of kernel_api.h
_LANES = 16  # kLanes
_ONEDNN_ROWS = 64  # rows that oneDNN's layout is chosen for; it serves all others too
_TILE_ROWS = 32  # rows from which matrix tiles are faster
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Epilogue(IntEnum):
    """What becomes of a product before it is written: `Epilogue` of kernel_api.h."""

    NONE = 0
    ADD = 1
    SILU_MUL = 2
    GELU_TANH_MUL = 3


class NativeWeight:
    """The weights of one or several linear layers over the same input, packed as one.

    Args:
        weights: each [out_features, in_features]; the outputs lie side by side, in this order.
        biases: [out_features] or None, one for each weight.
        gated: there are two, a gate and its partner, to be put in turns of sixteen columns, for the epilogues that
            multiply them; the output is then as wide as one.
    """

    def __init__(
        self, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None], *, gated: bool = False
    ) -> None:
        self._linear = torch.ops.cb_engine.linear.default
        join = _take_turns if gated else torch.cat
        self.columns = sum(map(len, weights))
        self.packed = _pack(join([weight.detach() for weight in weights]))
        self._tiled = _TiledWeight(weights, biases) if has_matrix_tiles(weights[0].dtype) else None
        self.bias: torch.Tensor | None = None
        if any(bias is not None for bias in biases):
            known = [
                torch.zeros(len(weight)) if bias is None else bias.detach().float()
                for weight, bias in zip(weights, biases, strict=True)
            ]
            bias = join(known)
            self.bias = F.pad(bias, (0, self.packed.shape[0] * _PANEL - len(bias)))

    def __call__(
        self, inputs: torch.Tensor, epilogue: Epilogue = Epilogue.NONE, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[..., in_features] to [..., columns], or half of that for the epilogues that multiply.

        Args:
            residual: [..., columns], for `Epilogue.ADD`.
        """
        if self._tiled is not None and prefers_tiles(inputs):
            return self._tiled(inputs, epilogue, residual)
        out: torch.Tensor = self._linear(inputs, self.packed, self.columns, self.bias, residual, epilogue)
        return out


class _TiledWeight:
    """The same in oneDNN's layout; arguments as for `NativeWeight`. A gate and its partner lie one after the other."""

    def __init__(self, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]) -> None:
        whole = torch.cat([weight.detach() for weight in weights])
        self._packed = torch.ops.mkldnn._reorder_linear_weight(whole, _ONEDNN_ROWS)
        self._bias: torch.Tensor | None = None
        if any(bias is not None for bias in biases):
            known = [
                weight.new_zeros(len(weight)) if bias is None else bias.detach()
                for weight, bias in zip(weights, biases, strict=True)
            ]
            self._bias = torch.cat(known)

    def __call__(self, inputs: torch.Tensor, epilogue: Epilogue, residual: torch.Tensor | None) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self._packed, self._bias, "none", [], "")
        if epilogue is Epilogue.ADD and residual is not None:
            return residual + out
        if epilogue in (Epilogue.SILU_MUL, Epilogue.GELU_TANH_MUL):
            gate, partner = out.chunk(2, -1)
            return (F.silu(gate) if epilogue is Epilogue.SILU_MUL else F.gelu(gate, approximate="tanh")) * partner
        return out


def has_matrix_tiles(dtype: torch.dtype) -> bool:
    """Whether this CPU has units for products of bfloat16 that only oneDNN uses."""
    return (
        dtype is torch.bfloat16 and torch.cpu._is_amx_tile_supported() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def prefers_tiles(inputs: torch.Tensor) -> bool:
    """Whether a product of [..., in_features] has rows enough for matrix tiles, where there are any."""
    return inputs.numel() >= _TILE_ROWS * inputs.shape[-1]


def _take_turns(pair: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows of two tensors in turns of sixteen, zeros where they end."""
    gate, partner = (F.pad(x.movedim(0, -1), (0, -len(x) % _LANES)).movedim(-1, 0) for x in pair)
    turns = torch.stack([x.reshape(-1, _LANES, *x.shape[1:]) for x in (gate, partner)], dim=1)
    return turns.flatten(0, 2)


def _pack(weight: torch.Tensor) -> torch.Tensor:
    """[N, K] to [ceil(N / 32), K / P, 32, P], P being the neighbours that the kernel multiplies in one lane."""
    pair = pair_of(weight.dtype)
    rows, inner = weight.shape
    panels = -(-rows // _PANEL)
    padded = F.pad(weight, (0, 0, 0, panels * _PANEL - rows)).contiguous()
    lanes = padded.view(torch.int32) if pair == 2 else padded  # a pair moves as one
    turned = lanes.view(panels, _PANEL, inner // pair).transpose(1, 2).contiguous()
    return turned.view(weight.dtype).view(panels, inner // pair, _PANEL, pair)


def pair_of(dtype: torch.dtype) -> int:
    """P of kernel_api.h."""
    return 2 if dtype is torch.bfloat16 else 1


class _PackedLinear(nn.Linear):
    """All that the plain layer had: `weight` stays the model's own parameter, for whoever reads it."""

    def __init__(self, linear: nn.Linear) -> None:
        self.__dict__.update(copy.copy(linear).__dict__)  # not nn.Linear's, which would make a weight


class NativeLinear(_PackedLinear):
    """`nn.Linear` over a `NativeWeight`."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        self._native = NativeWeight([linear.weight], [linear.bias])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        return self._native(inputs)


class OneDnnLinear(_PackedLinear):
    """`nn.Linear` over oneDNN's layout."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _ONEDNN_ROWS)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        if inputs.numel() == 0:  # a step without rows to sample from
            return F.linear(inputs, self.weight, self.bias)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self._packed, self.bias, "none", [], "")
        return out


def has_native_kernels() -> bool:
    """Whether this project's own kernel is there."""
    return build.load()


def is_plain(module: object) -> TypeGuard[nn.Linear]:
    """Whether a module is a linear layer on the CPU that nobody has wrapped or looks into, nor its weight."""
    return (
        type(module) is nn.Linear
        and type(module.weight) in (nn.Parameter, torch.Tensor)
        and module.weight.device.type == "cpu"
        and module.weight.dtype in _DTYPES
        and is_untouched(module)
    )


def is_native(module: object) -> TypeGuard[nn.Linear]:
    """Whether the native kernel takes a module's weights."""
    return is_plain(module) and module.in_features % pair_of(module.weight.dtype) == 0


def packed_linear(linear: nn.Linear, *, native: bool) -> nn.Module | None:
    """A packed layer in the place of a plain one, or None if its type has no faster kernel here."""
    if native:
        return NativeLinear(linear) if is_native(linear) else None
    if linear.weight.dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return OneDnnLinear(linear)
    return None
