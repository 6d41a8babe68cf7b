"""Chunked head against the plain formulation: values, gradients, memory; and the Triton kernels,
interpreted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from k3rl.trainer.logprobs import linear_logprobs

SEED = 20240607


def problem(tokens=37, width=16, vocabulary=53, dtype=torch.float64):
    g = torch.Generator().manual_seed(SEED)
    hidden = torch.randn(tokens, width, generator=g, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, width, generator=g, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, vocabulary, (tokens,), generator=g)
    requested = torch.randint(0, vocabulary, (tokens, 3), generator=g)
    weights = torch.randn(5, tokens, generator=g, dtype=dtype)
    return hidden, weight, targets, requested, weights


def plain(hidden, weight, targets, requested, temperature):
    logp = torch.log_softmax(hidden @ weight.t() / temperature, 1)
    entropy = -(logp.exp() * logp).sum(1)
    return logp.gather(1, targets[:, None]).squeeze(1), entropy, logp.gather(1, requested)


def mix(logprobs, entropy, requested, w, with_entropy):
    total = (w[0] * logprobs).sum() + (w[1:4].t() * requested).sum()
    return total + (w[4] * entropy).sum() if with_entropy else total


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("head_trained", [True, False])
@pytest.mark.parametrize("with_entropy", [True, False])
def test_equals_the_plain_formulation(temperature, head_trained, with_entropy):
    hidden, weight, targets, requested, w = problem(dtype=torch.float32)
    weight.requires_grad_(head_trained)
    inputs = [hidden, weight] if head_trained else [hidden]
    expected = plain(hidden, weight, targets, requested, temperature)
    found = linear_logprobs(
        hidden,
        weight,
        targets,
        temperature=temperature,
        entropy=True,
        entropy_gradient=with_entropy,
        requested_TK=requested,
        chunk_bytes=4 * 53 * 5,  # 5 tokens a chunk: 37 isn't a multiple
    )
    found = (found.logprobs_T, found.entropy_T, found.requested_TK)
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, atol=2e-5)
    g_expected = torch.autograd.grad(mix(*expected, w, with_entropy), inputs)
    g_found = torch.autograd.grad(mix(*found, w, with_entropy), inputs)
    for a, b in zip(g_found, g_expected, strict=True):
        assert torch.allclose(a, b, atol=1e-4, rtol=1e-4), f"seed {SEED}"


def test_temperature_is_applied_to_logits_not_to_logprobs():
    hidden, weight, targets, _, _ = problem(dtype=torch.float32)
    cold = linear_logprobs(hidden, weight, targets, temperature=0.5).logprobs_T
    assert not torch.allclose(cold, linear_logprobs(hidden, weight, targets).logprobs_T / 0.5, atol=1e-2)


def test_bad_input_is_refused():
    hidden, weight, targets, _, _ = problem()
    with pytest.raises(ValueError, match="temperature"):
        linear_logprobs(hidden, weight, targets, temperature=0.0)
    with pytest.raises(ValueError, match="targets"):
        linear_logprobs(hidden, weight, targets[:-1])


def test_no_tokens():
    hidden, weight, targets, _, _ = problem(dtype=torch.float32)
    out = linear_logprobs(hidden[:0], weight, targets[:0])
    out.logprobs_T.sum().backward()
    assert float(weight.grad.abs().sum()) == 0.0


MEASURE = """
import json, resource, sys, threading, time, torch
torch.manual_seed(0)
T, V, D = 4096, 151936, 16
hidden, weight = torch.randn(T, D), torch.randn(V, D)
hidden.requires_grad_(); weight.requires_grad_()
targets = torch.randint(0, V, (T,))
from k3rl.trainer.logprobs import linear_logprobs
def rss(): return int(open('/proc/self/statm').read().split()[1]) * 4096
linear_logprobs(hidden[:8], weight, targets[:8]).logprobs_T.sum().backward()
hidden.grad = weight.grad = None
base, peak, run = rss(), 0, True
def watch():
    global peak
    while run:
        peak = max(peak, rss()); time.sleep(0.001)
t = threading.Thread(target=watch); t.start()
if sys.argv[1] == 'lean':
    linear_logprobs(hidden, weight, targets).logprobs_T.sum().backward()
else:
    torch.log_softmax(hidden @ weight.t(), 1).gather(1, targets[:, None]).sum().backward()
run = False; t.join()
print(json.dumps({'peak': peak - base, 'grad': [hidden.grad.double().norm().item(),
weight.grad.double().norm().item()],
  'some': hidden.grad[:4].flatten().tolist() + weight.grad[targets[:4]].flatten().tolist()}))
"""


def measure(which: str) -> dict:
    env = dict(os.environ, OMP_NUM_THREADS="2")
    out = subprocess.run(
        [sys.executable, "-c", MEASURE, which], capture_output=True, text=True, check=True, env=env
    )
    return json.loads(out.stdout)


def test_4096_tokens_of_a_151936_vocabulary_need_less_than_an_eighth_of_one_logits_tensor():
    """The plain formulation holds three such tensors (logits, log-softmax, gradient)."""
    assert measure("lean")["peak"] < 4096 * 151936 * 4 / 8


@pytest.mark.slow
def test_memory_and_gradients_against_the_plain_formulation_at_full_size():
    lean, whole = measure("lean"), measure("plain")
    print(f"lean {lean['peak'] / 2**20:.0f} MiB, plain {whole['peak'] / 2**20:.0f} MiB")
    assert lean["peak"] < whole["peak"] / 8
    assert lean["some"] == pytest.approx(whole["some"], abs=1e-5)
    assert lean["grad"] == pytest.approx(whole["grad"], rel=1e-5)


def test_triton_kernels_agree_with_torch_when_interpreted():
    """In a process of its own: the interpreter is chosen before Triton is imported."""
    pytest.importorskip("triton")
    code = (
        "import torch\n"
        "from k3rl.trainer import logprobs_triton as f\n"
        "torch.manual_seed(3)\n"
        "z = torch.randn(3, 5000) * 4; z[1, 7] = float('-inf')\n"
        "assert f.usable(z)\n"
        "lse, p, H = f.softmax(z, torch.float32, True, True)\n"
        "logp = z.log_softmax(1)\n"
        "assert torch.allclose(lse, z.logsumexp(1), atol=1e-5)\n"
        "assert torch.allclose(p, logp.exp(), atol=1e-6)\n"
        "finite = torch.where(logp.isinf(), 0.0, logp)\n"
        "z2 = torch.randn(3, 5000); logp2 = z2.log_softmax(1); H2 = -(logp2.exp() * logp2).sum(1)\n"
        "lse2, _, E2 = f.softmax(z2, torch.float32, False, True)\n"
        "assert torch.allclose(E2, H2, atol=1e-4)\n"
        "g, h = torch.randn(3), torch.randn(3)\n"
        "out = f.logit_gradient(z2, lse2, g, E2, h, torch.float32)\n"
        "want = -logp2.exp() * (g[:, None] + h[:, None] * (logp2 + H2[:, None]))\n"
        "assert torch.allclose(out, want, atol=1e-6)\n"
        "out = f.logit_gradient(z2, lse2, g, None, None, torch.float32)\n"
        "assert torch.allclose(out, -logp2.exp() * g[:, None], atol=1e-6)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ, TRITON_INTERPRET="1"))
