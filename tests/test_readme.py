"""The README's example runs as it is written."""

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_example(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(example, str(README), "exec"), {})
    printed = capsys.readouterr().out
    assert "FusedLinear" in printed and "accumulate" in printed
