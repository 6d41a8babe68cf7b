"""The one-pass kernel gives the bits of the plain form. Without a GPU it runs in Triton's interpreter."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

CHECK = """
import torch
from k3rl.quant.mx import E2M1, E4M3, _elements, _factor
from k3rl.quant.mx_triton import fake_quantise_cuda

device = "cuda" if torch.cuda.is_available() else "cpu"
seed = int(torch.randint(2**31, ()))
print("seed", seed)
torch.manual_seed(seed)
x = torch.randn(300, 96) * 2.0 ** torch.randint(-40, 40, (300, 1))
x[:100] = torch.randint(-56, 57, (100, 96)) / 8  # on decision borders
x[7] = 0
x[8, 3] = float("inf")
x[9, 40] = float("nan")
x[10] = 2.0**-140
for dtype in (torch.float32, torch.bfloat16):
    for element in (E2M1, E4M3):
        for rule in ("ceil", "floor", "even"):
            y = x.to(dtype)
            elements, scale = _elements(y, element, rule)
            plain = (elements * _factor(scale)[..., None]).flatten(-2).to(dtype)
            ours = fake_quantise_cuda(y.to(device), element, rule).cpu()
            same = (ours == plain) | (ours.isnan() & plain.isnan())
            assert same.all(), (dtype, element, rule, y[~same][:5], ours[~same][:5], plain[~same][:5])
"""


def test_kernel_and_plain_form_agree_to_the_bit():
    pytest.importorskip("triton")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHECK)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
