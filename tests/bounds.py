"""How far a correct gradient may be from the float64 oracle, elementwise, from unit round-off and reduction length.

Forward bounds are in `ampkernels.reference`. Here: what backward adds, with the roundings that the docstrings name: the
saved tensor (pre-activation, softmax output, sum) was rounded to its dtype, dpre is rounded to the dtype computed in,
sums are fp32, every gradient is rounded once more.
"""

import math

import torch
from torch import Tensor

from ampkernels import reference
from ampkernels.reference import UNIT_ROUNDOFF, accumulation, compute_dtype, gamma, rounding

# max |act''|, to first order the effect of a rounded pre-activation on the derivative.
CURVATURE = {
    None: 0.0, "relu": 0.0, "gelu": 0.8, "gelu_tanh": 0.81, "silu": 0.5, "sigmoid": 0.1, "tanh": 0.77,
    "quick_gelu": 0.86, "relu2": 2.0,
}  # fmt: skip


def assert_within(actual: Tensor, expected: Tensor, bound: Tensor, what: str = "") -> None:
    """|actual - expected| <= bound, elementwise; NaN and inf must match exactly. Shows the worst element."""
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    bound = bound.detach().double().cpu().expand(expected.shape)
    special = ~expected.isfinite()
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    error = torch.where(special, torch.where(same, 0.0, math.inf), (actual - expected).abs())
    error = torch.where(error.isnan(), torch.full_like(error, math.inf), error)  # a NaN that should be a number
    over = error > torch.where(special, torch.zeros_like(bound), bound)
    if over.any():
        excess = torch.where(over, error / bound.clamp_min(1e-300), torch.zeros_like(error))
        i = int(excess.argmax())
        index = tuple(int(k) for k in torch.unravel_index(torch.tensor(i), expected.shape))
        raise AssertionError(
            f"{what}: {int(over.sum())} of {over.numel()} elements beyond the bound; worst at {index}: got "
            f"{actual.flatten()[i]:.9g}, expected {expected.flatten()[i]:.9g}, error {error.flatten()[i]:.3g} > "
            f"bound {bound.flatten()[i]:.3g}"
        )


def dpre_bound(
    dy: Tensor, pre: Tensor, pre_error: Tensor, activation: str | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(dpre, its error before it is rounded) for dpre = dy * act'(pre), from a `pre` that was saved rounded."""
    x = pre.detach().double().requires_grad_()
    reference.activation(x, activation).backward(torch.ones_like(x))
    assert x.grad is not None
    dpre = dy.double() * x.grad
    u, saved = UNIT_ROUNDOFF[compute_dtype(dtype)], UNIT_ROUNDOFF[dtype]
    moved = CURVATURE[activation] * (pre_error + saved * pre.abs())
    if activation in ("relu", "relu2"):  # the kink: a pre-activation that rounding carries across 0
        step = 1.0 if activation == "relu" else 0.0
        moved = moved + step * (pre.abs() <= pre_error + 1e-7)
    inner = torch.zeros_like(pre) if activation in (None, "relu") else gamma(32, u) * (1 + pre.abs())
    if activation not in (None, "relu", "relu2") and dtype.itemsize == 2:
        inner = inner + reference.ACTIVATION16 * x.grad.abs().clamp_min(0.1)
    return dpre, dy.double().abs() * (moved + inner)


def linear_grad_bounds(x, w, b, dy, activation, dtype, *, x_dtype=None, w_dtype=None, b_dtype=None):
    """Bounds of dinput, dweight, dbias (of 2-D operands in the dtype computed in)."""
    pre, pre_error = reference._pre(x, w, b, reference.FP32)
    dpre, error = dpre_bound(dy, pre, pre_error, activation, dtype)
    rounded = error + (UNIT_ROUNDOFF[dtype] * (dpre.abs() + error) + 0.5 * reference._SMALLEST[dtype])
    n, m = w.shape[0], x.shape[0]
    xa, wa, da = x.detach().double().abs(), w.detach().double().abs(), dpre.abs() + rounded
    dx = dpre @ w.detach().double()
    dw = dpre.mT @ x.detach().double()
    dx_error = rounded @ wa + accumulation(n, dtype) * (da @ wa)
    dw_error = rounded.mT @ xa + accumulation(m, dtype) * (da.mT @ xa)
    db_error = error.sum(0) + gamma(m + 8, UNIT_ROUNDOFF[compute_dtype(dtype)]) * dpre.abs().sum(0)
    return (
        dx_error + rounding(dx.abs() + dx_error, x_dtype or dtype),
        dw_error + rounding(dw.abs() + dw_error, w_dtype or dtype),
        db_error + rounding(dpre.sum(0).abs() + db_error, b_dtype or dtype),
    )


def softmax_grad_bound(y, dy, dim, scale, log, dtype, out_dtype, spread=0.0):
    """Bound of dinput from the exact output y; backward computes in the compute type of the y that was kept."""
    y, dy = y.detach().double(), dy.double()
    n = y.shape[dim] if y.dim() else 1
    u, saved = UNIT_ROUNDOFF[compute_dtype(out_dtype)], UNIT_ROUNDOFF[out_dtype]
    forward = gamma(n + 16, UNIT_ROUNDOFF[compute_dtype(dtype)]) + 8 * UNIT_ROUNDOFF[compute_dtype(dtype)] * spread
    if y.dim() == 0:
        return softmax_grad_bound(y[None], dy[None], 0, scale, log, dtype, out_dtype, spread)[0]
    floor = 0.5 * reference._SMALLEST[out_dtype]
    if log:
        p, total, size = y.exp(), dy.sum(dim, keepdim=True), dy.abs().sum(dim, keepdim=True)
        relative = torch.expm1((saved + 16 * u) * y.abs().clamp_max(200) + forward + gamma(n + 32, u))
        error = p * (relative * total.abs() + (1 + relative) * gamma(n + 8, u) * size) + 4 * u * dy.abs()
        dx = dy - p * total
    else:
        ya = y.abs()
        y_error = (saved + forward) * ya + floor + torch.finfo(compute_dtype(dtype)).smallest_normal
        size = ((ya + y_error) * dy.abs()).sum(dim, keepdim=True)
        total_error = (y_error * dy.abs()).sum(dim, keepdim=True) + gamma(n + 8, u) * size
        total = (y * dy).sum(dim, keepdim=True)
        error = y_error * (dy.abs() + size) + ya * (total_error + 4 * u * (dy.abs() + size))
        dx = y * (dy - total)
    error = abs(scale) * error
    return error + rounding((scale * dx).abs() + error, dtype)


def norm_grad_bounds(
    s, dims, weight, dy, eps, *, rms, dtype, saved_dtype, weight_offset=0.0, w_dtype=None, b_dtype=None
):
    """Bounds of dinput, dweight, dbias, from the exact s that forward normalised; `saved_dtype` is what s was kept in."""
    s, dy = s.detach().double(), dy.double()
    n = math.prod(s.shape[d] for d in dims)
    if s.dim() == len(dims):  # one row
        s, dy = s[None], dy[None]
    rows = tuple(range(s.dim() - len(dims)))
    m = math.prod(s.shape[d] for d in rows)
    u = UNIT_ROUNDOFF[compute_dtype(dtype)]
    mean = torch.zeros_like(s[..., :1]) if rms else s.mean(dims, keepdim=True)
    size = s.abs().mean(dims, keepdim=True)
    centred = s - mean
    rstd = (centred.square().mean(dims, keepdim=True) + eps).rsqrt()
    h = centred * rstd
    kept = 0.0 if saved_dtype is None else UNIT_ROUNDOFF[saved_dtype] * s.abs()
    h_error = (kept + 2 * u * s.abs() + (0.0 if rms else gamma(n + 2, u) * size)) * rstd
    # var, and with it rstd, from an s that was not yet rounded
    exact = (2 * u * s.abs() + (0.0 if rms else gamma(n + 2, u) * size)) * rstd
    rstd_relative = (
        gamma(n + 8, u) + (exact * h.abs()).mean(dims, keepdim=True) + exact.square().mean(dims, keepdim=True)
    )
    h_error = h_error + rstd_relative * (h.abs() + h_error)
    w = 1.0 if weight is None else weight.detach().double() + weight_offset
    g = dy * w
    ga = g.abs() * (1 + 4 * u)
    m1 = torch.zeros_like(mean) if rms else g.mean(dims, keepdim=True)
    m2 = (g * h).mean(dims, keepdim=True)
    m1_error = 0.0 if rms else gamma(n + 4, u) * ga.mean(dims, keepdim=True)
    m2_error = (ga * h_error).mean(dims, keepdim=True) + gamma(n + 4, u) * (ga * (h.abs() + h_error)).mean(
        dims, keepdim=True
    )
    dx = rstd * (g - m1 - h * m2)
    inner = 6 * u * (ga + m1.abs() + (h * m2).abs()) + m1_error + (h.abs() + h_error) * m2_error + h_error * m2.abs()
    dx_error = rstd * inner * (1 + rstd_relative) + rstd_relative * rstd * (ga + m1.abs() + (h * m2).abs())
    u_sum = gamma(m + 16, u)
    dw_error = (dy.abs() * h_error).sum(rows) + u_sum * (dy.abs() * (h.abs() + h_error)).sum(rows)
    db_error = u_sum * dy.abs().sum(rows)
    dw, db = (dy * h).sum(rows).abs(), dy.sum(rows).abs()
    return (
        dx_error + rounding(dx.abs() + dx_error, dtype),
        dw_error + rounding(dw + dw_error, w_dtype or dtype),
        db_error + rounding(db + db_error, b_dtype or dtype),
    )
