"""Newton-Schulz orthogonalisation of a batch of matrices. Source: Muon (K. Jordan, 2024) with its quintic."""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""p(x) = a x + b x^3 + c x^5: steep at zero rather than exact at one, so that five steps lift small singular values."""
BAND = (0.68, 1.14)
"""Where five steps put singular values that start above about 1 % of the Frobenius norm."""


def orthogonalise(matrices_NRC: Tensor, iterations: int = 5, dtype: torch.dtype | None = None) -> Tensor:
    """Each matrix [R, C] with its singular values moved into `BAND`, its singular vectors kept. Zero stays zero.

    Computed in ``dtype``: bfloat16 on CUDA and float32 elsewhere by default. Returns the input's dtype.
    """
    work = dtype or (torch.bfloat16 if matrices_NRC.is_cuda else torch.float32)
    tall = matrices_NRC.shape[-2] > matrices_NRC.shape[-1]
    X = matrices_NRC.mT if tall else matrices_NRC
    norm = torch.linalg.matrix_norm(X.float(), keepdim=True).clamp_min(1e-30)
    X = (X.float() / norm).to(work)
    a, b, c = COEFFICIENTS
    for _ in range(iterations):
        A = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return (X.mT if tall else X).to(matrices_NRC.dtype)
