"""`python -m ampkernels info | demo | numerics`."""

import argparse
import importlib
import sys

# A command's module is imported when it is called: `info` needs neither transformers nor matplotlib.
COMMANDS = {
    "info": ("ampkernels._build", "what was built, with what, and why something is missing"),
    "demo": ("ampkernels.demo", "a sentence encoder and a Vision Transformer: eager against fused"),
    "numerics": ("ampkernels.numerics", "the error of every op against float64, eager beside fused"),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ampkernels",
        description="Mixed-precision kernels with explicit accumulators.",
        epilog="\n".join(f"  {name:<10}{text}" for name, (_, text) in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the command's own; try --help after it")
    args = parser.parse_args(argv)
    return int(importlib.import_module(COMMANDS[args.command][0]).main(args.arguments) or 0)


if __name__ == "__main__":
    sys.exit(main())
