"""Linear layers, norms and rotation of the native kernels, on every instruction set this CPU has."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cb_engine.native import build
from cb_engine.runner.fusion.linear import Epilogue, NativeWeight

pytestmark = pytest.mark.skipif(not build.load(), reason="the native kernels cannot be built here")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.float(), expected.float(), atol=tolerance * expected.abs().max().item(), rtol=0)


def linears(columns: tuple[int, ...], inner: int, dtype: torch.dtype, bias: bool) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(inner, n, bias=bias).to(dtype).requires_grad_(False) for n in columns]


def native(layers: list[nn.Linear], *, gated: bool = False) -> NativeWeight:
    return NativeWeight([layer.weight for layer in layers], [layer.bias for layer in layers], gated=gated)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 11, 12, 13, 50, 100])
def test_products_side_by_side(isa: int, rows: int, dtype: torch.dtype, bias: bool) -> None:
    """Widths that fill no panel, and panels that two layers share."""
    layers = linears((40, 7, 33), 36, dtype, bias)
    x = randn(rows, 36, dtype=dtype)
    assert_close(native(layers)(x), torch.cat([layer(x) for layer in layers], dim=-1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_residual_is_added_to_the_rounded_product(isa: int, dtype: torch.dtype) -> None:
    (layer,) = linears((50,), 24, dtype, True)
    x, residual = randn(2, 5, 24, dtype=dtype), randn(2, 5, 50, dtype=dtype, seed=1)
    out = native([layer])(x, Epilogue.ADD, residual)
    assert out.shape == residual.shape
    assert_close(out, residual + layer(x))


@pytest.mark.parametrize("width", [16, 20, 48])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("epilogue", "activation"),
    [(Epilogue.SILU_MUL, F.silu), (Epilogue.GELU_TANH_MUL, lambda x: F.gelu(x, approximate="tanh"))],
    ids=["silu", "gelu_tanh"],
)
def test_gates(isa: int, epilogue: Epilogue, activation: object, dtype: torch.dtype, width: int) -> None:
    gate, up = linears((width, width), 32, dtype, True)
    x = 4 * randn(13, 32, dtype=dtype)
    out = native([gate, up], gated=True)(x, epilogue)
    assert out.shape == (13, width)
    assert_close(out, activation(gate(x)) * up(x))  # type: ignore[operator]


def test_activations_far_out(isa: int) -> None:
    """Where an exponential over- or underflows, and at NaN."""
    identity = nn.Linear(16, 16, bias=False).requires_grad_(False)
    identity.weight.copy_(torch.eye(16))
    ones = nn.Linear(16, 16).requires_grad_(False)
    ones.weight.zero_()
    ones.bias.fill_(1.0)
    x = torch.tensor([[-1e30, -200.0, -100.0, -20.0, -1e-3, 0.0, 1e-3, 20.0, 100.0, 200.0, 1e30, *[0.5] * 5]])
    weight = native([identity, ones], gated=True)
    torch.testing.assert_close(weight(x, Epilogue.SILU_MUL), F.silu(x), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(
        weight(x[:, 1:10].repeat(1, 2)[:, :16], Epilogue.GELU_TANH_MUL),
        F.gelu(x[:, 1:10].repeat(1, 2)[:, :16], approximate="tanh"),
        atol=1e-5,
        rtol=1e-5,
    )
    assert weight(torch.full((1, 16), torch.nan), Epilogue.SILU_MUL).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_in_any_batch_and_on_any_number_of_threads(isa: int, dtype: torch.dtype) -> None:
    layers = linears((96, 64), 64, dtype, True)
    weight = native(layers)
    x = randn(200, 64, dtype=dtype)
    together = weight(x)
    assert torch.equal(torch.cat([weight(row) for row in torch.split(x, 1)]), together)
    assert torch.equal(torch.cat([weight(rows) for rows in torch.split(x, 37)]), together)
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert torch.equal(weight(x), together)
    finally:
        torch.set_num_threads(threads)


def test_rows_that_lie_in_any_way(isa: int) -> None:
    (layer,) = linears((32,), 16, torch.bfloat16, False)
    wide = randn(9, 48, dtype=torch.bfloat16)
    unevenly = randn(4, 5, 16, dtype=torch.bfloat16)[:, :3]
    row = randn(2, 1, 16, dtype=torch.bfloat16)
    expanded = (row.expand(2, 3, 16), row[:1].expand(2, 3, 16), row[:1].expand(3, 5, 16).transpose(0, 1))
    for x in (wide[:, 16:32], unevenly, unevenly.transpose(0, 1), randn(16, 7, dtype=torch.bfloat16).T, *expanded):
        weight = native([layer])
        assert_close(weight(x), layer(x))
        residual = randn(32, *reversed(x.shape[:-1]), dtype=torch.bfloat16).movedim(0, -1)
        residual = residual.transpose(0, -2) if x.dim() == 3 else residual
        assert_close(weight(x, Epilogue.ADD, residual), residual + layer(x))
        norm = torch.ops.cb_engine.rms_norm(x, torch.ones(16, dtype=torch.bfloat16), 1e-6, 0.0, True)
        assert_close(norm, F.rms_norm(x.float(), (16,), eps=1e-6).bfloat16())


def test_norms_over_heads_that_lie_in_any_way(isa: int) -> None:
    fused = randn(2, 5, 9, 16, dtype=torch.bfloat16)
    weight = torch.ones(16, dtype=torch.bfloat16)
    for x in (fused[:, :, 2:6], fused[0].expand(3, 5, 9, 16), fused[:, :1].expand(2, 5, 9, 16)[:, :, ::2]):
        norm = torch.ops.cb_engine.rms_norm(x, weight, 1e-6, 0.0, True)
        assert_close(norm, F.rms_norm(x.float(), (16,), eps=1e-6).bfloat16())


def test_long_sums_keep_their_digits(isa: int) -> None:
    (layer,) = linears((32,), 20_000, torch.float32, False)
    x = randn(3, 20_000, dtype=torch.float32)
    exact = x.double() @ layer.weight.double().T
    error = (native([layer])(x) - exact).abs().max() / exact.std()
    assert error < 4e-6, "one chain of 20,000 additions is off by more than 1e-5"


def test_no_rows(isa: int) -> None:
    (layer,) = linears((32,), 16, torch.bfloat16, False)
    assert native([layer])(torch.zeros(2, 0, 16, dtype=torch.bfloat16)).shape == (2, 0, 32)


@pytest.mark.parametrize("dim", [16, 24, 100])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("offset", "round_first"), [(0.0, True), (0.0, False), (1.0, False)])
def test_norms(isa: int, offset: float, round_first: bool, dtype: torch.dtype, dim: int) -> None:
    x, weight = 3 * randn(2, 7, dim, dtype=dtype), randn(dim, dtype=dtype, seed=1)
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    if round_first:
        normed = normed.to(dtype).float()
    expected = (normed * (weight.float() + offset)).to(dtype)
    assert_close(torch.ops.cb_engine.rms_norm(x, weight, 1e-5, offset, round_first), expected)


def test_norms_of_the_heads_of_a_fused_projection(isa: int) -> None:
    fused = randn(5, 6, 16, dtype=torch.float32)
    heads, weight = fused[:, 1:4], torch.ones(16)
    out = torch.ops.cb_engine.rms_norm(heads, weight, 1e-6, 0.0, True)
    assert out.is_contiguous()
    assert_close(out, F.rms_norm(heads, (16,), weight, 1e-6))


@pytest.mark.parametrize("rotary_dim", [8, 20, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotation(isa: int, dtype: torch.dtype, rotary_dim: int) -> None:
    """In place, on heads inside a wider tensor; what lies beside them and beyond the rotated part stays."""
    fused = randn(9, 5, 64, dtype=dtype)
    angle = randn(9, rotary_dim, dtype=torch.float32, seed=1)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    before = fused.clone()
    torch.ops.cb_engine.rotary_(fused[:, 1:4], cos, sin)
    x = before[:, 1:4, :rotary_dim]
    half = torch.cat([-x[..., rotary_dim // 2 :], x[..., : rotary_dim // 2]], dim=-1)
    assert_close(fused[:, 1:4, :rotary_dim], x * cos.unsqueeze(1) + half * sin.unsqueeze(1))
    assert torch.equal(fused[:, 1:4, rotary_dim:], before[:, 1:4, rotary_dim:])
    assert torch.equal(fused[:, 0], before[:, 0])
    assert torch.equal(fused[:, 4], before[:, 4])


def test_wrong_arguments_are_refused() -> None:
    ops = torch.ops.cb_engine
    (layer,) = linears((32,), 16, torch.float32, False)
    packed = native([layer]).packed
    x = torch.zeros(3, 16)
    with pytest.raises(ValueError, match="does not fit an input"):
        ops.linear(torch.zeros(3, 18), packed, 32, None, None, 0)
    with pytest.raises(ValueError, match="does not fit an input"):
        ops.linear(x.bfloat16(), packed, 32, None, None, 0)
    with pytest.raises(ValueError, match="bias must be float32"):
        ops.linear(x, packed, 32, torch.zeros(31), None, 0)
    with pytest.raises(ValueError, match="residual is for"):
        ops.linear(x, packed, 32, None, torch.zeros(3, 32), 0)
    with pytest.raises(ValueError, match="output's shape"):
        ops.linear(x, packed, 32, None, torch.zeros(3, 31), 1)
    with pytest.raises(ValueError, match="unknown epilogue"):
        ops.linear(x, packed, 32, None, None, 9)
    with pytest.raises(TypeError, match="Double"):
        ops.rms_norm(x.double(), torch.ones(16).double(), 1e-5, 0.0, True)
    with pytest.raises(ValueError, match="weight must be"):
        ops.rms_norm(x, torch.ones(15), 1e-5, 0.0, True)
    with pytest.raises(ValueError, match="R even"):
        ops.rotary_(torch.zeros(3, 2, 16), torch.zeros(3, 18), torch.zeros(3, 18))
    with pytest.raises(ValueError, match="sin must be like cos"):
        ops.rotary_(torch.zeros(3, 2, 16), torch.zeros(3, 8), torch.zeros(3, 6))
