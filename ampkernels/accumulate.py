"""`Accumulate`: in what type, and in what order, a GEMM adds (docs/design.md, section 3).

The policy in force for a call is, first found first taken: the call's `accumulate` argument (which is where a module
passes its own), the innermost `with ampkernels.accumulate(...)` block, the default `"fp32"`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

import torch

_NAMES = {torch.float32: "fp32", torch.float16: "fp16"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True)
class Accumulate:
    """The summation tree of each output element of a GEMM, over k ascending.

    Products are exact. Inside a chunk of `chunk` consecutive k, steps of 16 accumulate in `dtype`, from zero; chunk
    sums are added in fp32, in ascending order. `chunk=None` leaves chunks to the library: partial sums are still fp32
    and added in a fixed order (run-to-run deterministic), but the tree may depend on the shape.

    Args:
        dtype: `torch.float32`, or `torch.float16` (for fp16 inputs only).
        chunk: a positive multiple of 16, or None.

    The string forms are `"fp32"`, `"fp32/512"`, `"fp16"`, `"fp16/128"`: what `str()` gives and `parse` takes.
    """

    dtype: torch.dtype = torch.float32
    chunk: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in _NAMES:
            raise ValueError(f"Accumulate: dtype must be torch.float32 or torch.float16, got {self.dtype}")
        if self.chunk is None:
            return
        if type(self.chunk) is not int or self.chunk <= 0 or self.chunk % 16:
            raise ValueError(f"Accumulate: chunk must be a positive multiple of 16 or None, got {self.chunk!r}")

    def __str__(self) -> str:
        return _NAMES[self.dtype] if self.chunk is None else f"{_NAMES[self.dtype]}/{self.chunk}"

    @staticmethod
    @functools.cache
    def _parse_text(text: str) -> Accumulate:
        name, slash, chunk = text.partition("/")
        if name not in _DTYPES or (slash and not (chunk.isascii() and chunk.isdigit())):
            raise ValueError(f"Accumulate: must be 'fp32', 'fp16', 'fp32/<chunk>' or 'fp16/<chunk>', got {text!r}")
        return Accumulate(_DTYPES[name], int(chunk) if slash else None)

    @staticmethod
    def parse(value: Accumulate | str) -> Accumulate:
        """The policy that `value` names; an `Accumulate` is returned as it is."""
        if isinstance(value, Accumulate):
            return value
        if isinstance(value, str):
            return Accumulate._parse_text(value)
        raise TypeError(f"Accumulate: must be an Accumulate or a string such as 'fp32/512', got {type(value).__name__}")


FP32 = Accumulate()
_context: ContextVar[Accumulate] = ContextVar("ampkernels.accumulate", default=FP32)
# Whether an `accumulate` block was ever entered: until then nobody asks the ContextVar, which torch.compile before 2.12
# cannot trace. It stays true after the block, whose context may live on in a task that was started inside.
_entered = False


@contextlib.contextmanager
def accumulate(policy: Accumulate | str) -> Iterator[Accumulate]:
    """Makes `policy` the default of the calls inside the block, for this thread or task only.

    A call's own `accumulate=` argument, and a module's, still win over it.
    """
    global _entered
    token = _context.set(Accumulate.parse(policy))
    _entered = True
    try:
        yield _context.get()
    finally:
        _context.reset(token)


def resolve(op: str, argument: Accumulate | str | None, dtype: torch.dtype) -> Accumulate:
    """The policy in force for a call of `op` that computes in `dtype`; raises if there is no such kernel."""
    in_force = _context.get() if _entered else FP32
    policy = in_force if argument is None else Accumulate.parse(argument)
    if policy is FP32 or policy == FP32:
        return FP32
    if policy.dtype == torch.float16 and dtype != torch.float16:
        raise ValueError(
            f"{op}: accumulate must be fp32 for inputs of {dtype}, got {policy}, which takes float16 inputs only"
        )
    if dtype not in (torch.float16, torch.bfloat16):  # a library's products, whose tree is the library's
        raise NotImplementedError(f"{op}: accumulate must be 'fp32' for inputs of {dtype}, got '{policy}'")
    return policy
