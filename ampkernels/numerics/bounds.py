"""How far a GEMM under an accumulation policy may be from the exact one, from the rule of the tensor core."""

from __future__ import annotations

import math

import torch

from ..accumulate import Accumulate


def forward_bound(k: int, accumulate: Accumulate | str = "fp32", *, arch: str = "sm90") -> float:
    """max |fl(a . b) - a . b| / (|a| . |b|) over all fp16 or bf16 vectors of length `k`, to first order.

    One tensor-core step of n products (16 on sm90, 8 on sm80) truncates n + 1 terms, each by less than 2^-f of the
    largest (f = 25, 24), and then the sum: by 2^-23 to fp32, or by half of that place, 2^-11, to fp16. A chunk is
    `chunk` / n steps; each chunk sum is added with one rounding, 2^-24. So, with s steps in a chunk and c chunks,

        s * ((n + 1) 2^-f + 2^-23) + c * 2^-24      fp32
        s * ((n + 1) 2^-f + 2^-11) + c * 2^-24      fp16, as long as nothing overflows or is subnormal there

    A bound for the worst data: on random data errors cancel, and on data of one sign each truncation loses half of what
    it may. With chunk=None this is one chain over all of K, the worst that a library's split may do.
    """
    policy = Accumulate.parse(accumulate)
    if arch not in ("sm80", "sm90"):
        raise ValueError(f"forward_bound: arch must be 'sm80' or 'sm90', got {arch!r}")
    products, fraction = (16, 25) if arch == "sm90" else (8, 24)
    last = 2.0**-23 if policy.dtype == torch.float32 else 2.0**-11
    chunk = min(policy.chunk or k, k)
    steps = math.ceil(chunk / 16) * 16 // products
    chunks = math.ceil(k / chunk) if chunk else 0
    return steps * ((products + 1) * 2.0**-fraction + last) + chunks * 2.0**-24
