"""Log-probs of a large vocabulary: time and memory against the plain way, values against float64.

python benchmarks/logprobs.py --out benchmarks/results/logprobs.h200.json
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from harness import Result, peak_gib, seconds
from torch import Tensor

from k3rl.trainer.logprobs import linear_logprobs


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """All logits at once, in float32."""
    return (hidden @ weight.t()).float().log_softmax(-1).gather(1, targets[:, None]).squeeze(1)


def ours(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return linear_logprobs(hidden, weight, targets).logprobs_T


def check(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    """A few tokens in float64: values, and gradients of hidden states and head."""
    h, w, t = hidden[:64].detach(), weight.detach(), targets[:64]
    grad = torch.randn(64, device=h.device)
    exact = [x.double().requires_grad_() for x in (h, w)]
    expected = plain_double(*exact, t)
    expected.backward(grad.double())
    for with_head in (False, True):
        leaves = [h.clone().requires_grad_(), w.clone().requires_grad_(with_head)]
        values = ours(*leaves, t)
        values.backward(grad)
        assert (values.double() - expected).abs().max() < 2e-2, (values.double() - expected).abs().max()
        for leaf, reference in zip(leaves, exact, strict=True):
            if leaf.grad is not None and reference.grad is not None:
                error = (leaf.grad.double() - reference.grad).norm() / reference.grad.norm()
                assert error < 2e-2, error


def plain_double(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return (hidden @ weight.t()).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--width", type=int, default=1024)
    args = parser.parse_args()
    result = Result("logprobs", "h200")
    torch.manual_seed(0)
    like = {"device": "cuda", "dtype": torch.bfloat16}
    hidden = torch.randn(args.tokens, args.width, **like)
    weight = torch.randn(args.vocabulary, args.width, **like) * args.width**-0.5
    targets = torch.randint(args.vocabulary, (args.tokens,), device="cuda")
    grad = torch.randn(args.tokens, device="cuda")
    check(hidden, weight, targets)
    for head in (False, True):

        def run(form, head=head) -> None:
            h, w = hidden.clone().requires_grad_(), weight.requires_grad_(head)
            w.grad = None
            form(h, w, targets).backward(grad)

        label = "hidden states and head" if head else "hidden states, head frozen"
        times = {form.__name__: 1e3 * seconds(lambda form=form: run(form)) for form in (plain, ours)}
        memory = {form.__name__: peak_gib(lambda form=form: run(form)) for form in (plain, ours)}
        result.row(f"forward and backward to {label}", times["ours"], "ms", "plain", times["plain"])
        result.row(f"extra memory, {label}", memory["ours"], "GiB", "plain", memory["plain"])
    result.write(args.out)


if __name__ == "__main__":
    main()
