"""The main job: a pretrained sentence encoder and a Vision Transformer in training, eager against fused."""

from __future__ import annotations

import argparse
from pathlib import Path


def main(argv: list[str] | None = None) -> int:
    """``python -m ampkernels demo``."""
    parser = argparse.ArgumentParser(prog="python -m ampkernels demo", description=__doc__)
    parser.add_argument("--device", default=None, help="cpu or cuda; default: cuda where there is one")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="of autocast")
    parser.add_argument("--model", default=None, help="a path or hub name of a sentence encoder (default: MiniLM-L6)")
    parser.add_argument("--steps", type=int, default=200, help="training steps of the Vision Transformer")
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="where the plot goes")
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error(f"--steps must be at least 1, got {args.steps}")

    try:
        import matplotlib
        import rich
        import sklearn
        import timm
        import transformers
    except ImportError as error:
        parser.exit(2, f"demo: {error.name} is missing; run `make demo`, or pip install 'ampkernels[demo]'\n")
    del matplotlib, rich, sklearn, timm, transformers

    import torch

    from . import digits, encoder
    from .report import console

    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: no GPU is visible to torch")
    dtype = getattr(torch, args.dtype)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    console.print(f"[bold]ampkernels demo[/] on {name}, torch {torch.__version__}, autocast to {args.dtype}\n")

    embedding = encoder.run(device, dtype, args.model)
    training = digits.run(device, dtype, args.steps, args.out)
    console.print(f"\n[bold]In one line:[/] {embedding.sentence}; {training.sentence}.")
    return 0
