"""Golden digests, tests/golden/*.json: the bits that a GPU once gave are the bits that this machine gives.

Written by `python -m ampkernels.numerics.golden write --device cuda`. On a GPU everything is recomputed on it; without
one, what is promised for every device is recomputed on the CPU.
"""

import json
from pathlib import Path

import pytest

from ampkernels.numerics import golden

FILES = sorted((Path(__file__).parent / "golden").glob("*.json"))


@pytest.mark.skipif(not FILES, reason="no golden file yet")
@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_golden(device, path):
    content = json.loads(path.read_text())
    assert content["gpu"], "a golden file is written on a GPU"
    wrong, count = golden.differences(device, content)
    assert count > 500
    assert not wrong, f"{len(wrong)} of {count} outputs have other bits than on {content['gpu']}:\n" + "\n".join(wrong)
