"""A small sweep of every op, forward and backward, for compute-sanitizer (`make sanitize`): each tier of the row
kernels and each kernel of the GEMMs once or more, at sizes that the tool finishes in minutes.

    compute-sanitizer --tool memcheck  --error-exitcode 9 python tools/sanitizer_sweep.py
    compute-sanitizer --tool racecheck --error-exitcode 9 python tools/sanitizer_sweep.py norm

With PYTORCH_NO_CUDA_MEMORY_CACHING=1 memcheck also sees reads just past a tensor, which lie in torch's pool otherwise.
`softmax` and `mlp` are clean so. `norm` is not, since the tool takes a `cp.async` that copies fewer than 16 bytes, in
norm backward, for a read of all 16 (of a kernel of nothing else, too); nor are `gemm` and `gated`, whose operands off 16
bytes are read in whole aligned blocks that hold an element or more (csrc/cuda/realign.cuh).
With --destroy-on-device-error kernel the sweep goes on behind these.

`softmax`, `norm`, `gemm`, `gated` or `mlp` picks a part. Exits with 1 where a result is not finite.
"""

import itertools
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import ampkernels as ak

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def randn(*shape: int, dtype: torch.dtype, grad: bool = True) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=F32).to(dtype).requires_grad_(grad)


def backward(y: Tensor | tuple[Tensor, ...]) -> None:
    outputs = (y,) if isinstance(y, Tensor) else y
    torch.autograd.backward(outputs, [torch.randn_like(o) for o in outputs])
    torch.cuda.synchronize()
    for o in outputs:
        if not o.isfinite().all():
            sys.exit("a result is not finite")


Call = tuple[str, Callable[..., Tensor | tuple[Tensor, Tensor]], tuple[object, ...], dict[str, object]]


def row_inputs() -> Iterator[tuple[str, int, tuple[Tensor, Tensor, Tensor, Tensor]]]:
    # Row lengths of every tier: rows per warp, warp, CTA, cluster of 2 and 16, streaming; odd ones beside even ones.
    lengths = [1, 7, 64, 1000, 1024, 4096, 4099, 20000, 40000, 131072, 300001]
    for dtype, cols in itertools.product((BF16, F16, F32, F64), lengths):
        if dtype in (F16, F64) and cols not in (7, 1024, 4099, 20000):
            continue
        n = 37 if cols < 5000 else 3
        label = f"{str(dtype).removeprefix('torch.')} {n}x{cols}"
        x, r, w, b = (randn(*s, dtype=dtype) for s in ((n, cols), (n, cols), (cols,), (cols,)))
        yield label, cols, (x, r, w, b)


def norm() -> Iterator[Call]:
    for label, cols, (x, r, w, b) in row_inputs():
        yield f"layer_norm {label}", ak.layer_norm, (x, (cols,), w, b), {}
        yield f"rms_norm {label}", ak.rms_norm, (x, (cols,), w), {}
        yield f"layer_norm + residual {label}", ak.layer_norm, (x, (cols,), w, b), {"residual": r}
        yield f"rms_norm + residual {label}", ak.rms_norm, (x, (cols,), w), {"residual": r}
    for dtype in (BF16, F32):
        offset, w = misaligned(dtype), randn(1001, dtype=F32)
        yield f"rms_norm misaligned {dtype}", ak.rms_norm, (offset, (1001,), w), {}
        yield f"layer_norm misaligned {dtype}", ak.layer_norm, (offset, (1001,), w, w), {}


def misaligned(dtype: torch.dtype) -> Tensor:
    return randn(37 * 1001 + 1, dtype=dtype, grad=False)[1:].view(37, 1001).requires_grad_()


def softmax() -> Iterator[Call]:
    for label, _, (x, _, _, _) in row_inputs():
        yield f"softmax {label}", ak.softmax, (x,), {}
        yield f"log_softmax {label}", ak.log_softmax, (x,), {}
    for dtype in (BF16, F32):
        for shape in ((3, 200, 70), (2, 1500, 33), (1, 20000, 40)):  # along a dimension that is not the last
            yield f"softmax dim=1 {dtype} {shape}", ak.softmax, (randn(*shape, dtype=dtype), 1), {}
        x = randn(2, 2, 65, 130, dtype=dtype)
        keep = torch.rand(65, 130, device="cuda") > 0.3
        yield f"softmax causal {dtype}", ak.softmax, (x,), {"causal": True}
        yield f"softmax mask {dtype}", ak.softmax, (x,), {"scale": 0.5, "mask": keep}
        yield f"softmax misaligned {dtype}", ak.softmax, (misaligned(dtype),), {}


GEMM_SHAPES = [
    (1, 64, 256),
    (3, 17, 40),
    (70, 136, 520),
    (150, 264, 768),
    (300, 520, 1032),
    (257, 384, 200),
    (128, 192, 2048),
]


def policies(dtype: torch.dtype) -> list[str]:
    return ["fp32", "fp32/128", *(["fp16", "fp16/64"] if dtype == F16 else [])]


def gemm() -> Iterator[Call]:
    for dtype, (m, n, k), activation in itertools.product((BF16, F16), GEMM_SHAPES, (None, "gelu")):
        for policy in policies(dtype):
            x, w, b = randn(m, k, dtype=dtype), randn(n, k, dtype=dtype), randn(n, dtype=F32)
            label = f"linear {dtype} {m}x{n}x{k} {activation} {policy}"
            options: dict[str, object] = {"activation": activation, "accumulate": policy}
            yield label, ak.linear, (x, w, b), options
            r = randn(m, n, dtype=F32 if activation else dtype)
            yield f"{label} + residual", ak.linear, (x, w, b), {**options, "residual": r}


def gated() -> Iterator[Call]:
    for dtype, (m, n, k) in itertools.product((BF16, F16), GEMM_SHAPES):
        for policy in policies(dtype):
            x, w, b = randn(m, k, dtype=dtype), randn(2 * n, k, dtype=dtype), randn(2 * n, dtype=dtype)
            yield f"gated_linear {dtype} {m}x{n}x{k} {policy}", ak.gated_linear, (x, w, b), {"accumulate": policy}


def mlp() -> Iterator[Call]:
    for dtype, (m, n, k) in itertools.product((BF16, F16), GEMM_SHAPES[2:]):
        for policy in policies(dtype)[:2]:
            x, w1, b1 = randn(m, k, dtype=dtype), randn(n, k, dtype=dtype), randn(n, dtype=F32)
            w2, b2 = randn(k, n, dtype=dtype), randn(k, dtype=F32)
            yield f"mlp {dtype} {m}x{n}x{k} {policy}", ak.mlp, (x, w1, b1, w2, b2), {"accumulate": policy}


PARTS = {"softmax": softmax, "norm": norm, "gemm": gemm, "gated": gated, "mlp": mlp}


def main(names: list[str]) -> None:
    if unknown := set(names) - set(PARTS):
        sys.exit(f"unknown part {', '.join(sorted(unknown))}: one of {', '.join(PARTS)}")
    torch.manual_seed(0)
    count = 0
    for name in names or PARTS:
        for label, function, args, options in PARTS[name]():
            print(label, flush=True)
            backward(function(*args, **options))
            count += 1
    print(f"{count} calls, forward and backward")


if __name__ == "__main__":
    main(sys.argv[1:])
