"""Drawing tokens: a random stream without state, and inverse-CDF sampling of the processed distribution.

A trajectory's draws must not depend on the batch, worker or device they happen in, so that a piece
generated again after a fault, or resumed after a pause, comes out the same. Hence no generator object: draw
``i`` of the stream with key ``k`` is a hash of ``(k, i)``, computed with the same bits by numpy and torch, on
any device. Each row of a batch is processed on its own; no operation mixes rows.

Order of processing (that of vLLM's sampler): temperature, min-p, top-k, top-p. Log-probs returned are those
of the distribution that was drawn from (spec/09 trap 1), except at temperature 0: greedy tokens carry their
log-prob at temperature 1 over the whole vocabulary, since under the processed one it is 0 by construction.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from rollout.engine import SamplingParams

# splitmix64 (Steele, Lea, Flood 2014): the odd constant of its counter, the two of its finaliser.
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_TWO_TO_MINUS_53 = 2.0**-53


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x


def _mix_numpy(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2)
    return x ^ (x >> np.uint64(31))


def _stream_numpy(keys_N: np.ndarray, positions_N: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        keys, positions = np.asarray(keys_N).astype(np.uint64), np.asarray(positions_N).astype(np.uint64)
        golden = np.uint64(_GOLDEN)
        return _mix_numpy(_mix_numpy(keys + golden) ^ ((positions + np.uint64(1)) * golden))


def stream_bits(key: int, position: int) -> int:
    """The 64 bits behind one draw: a seed for generators that are not this one."""
    return int(_stream_numpy(np.array([key]), np.array([position]))[0])


def uniform_numpy(keys_N: np.ndarray, positions_N: np.ndarray) -> np.ndarray:
    """Draw number ``positions_N`` of the streams ``keys_N`` (int64): float64 in [0, 1), 53 random bits."""
    return (_stream_numpy(keys_N, positions_N) >> np.uint64(11)).astype(np.float64) * _TWO_TO_MINUS_53


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift; torch's ``>>`` on int64 copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix_torch(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift_right(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shift_right(x, 27)) * _signed(_MIX_2)
    return x ^ _shift_right(x, 31)


def uniform_torch(keys_N: torch.Tensor, positions_N: torch.Tensor) -> torch.Tensor:
    """`uniform_numpy` on the tensors' device (int64 in, float64 out), bit for bit."""
    golden = _signed(_GOLDEN)
    bits = _mix_torch(_mix_torch(keys_N + golden) ^ ((positions_N + 1) * golden))
    return _shift_right(bits, 11).to(torch.float64) * _TWO_TO_MINUS_53


def check_params(sampling: SamplingParams) -> None:
    """Raise `ValueError` for a setting outside its range."""
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise ValueError(f"temperature must be finite and at least 0, got {sampling.temperature}")
    if not 0 < sampling.top_p <= 1:
        raise ValueError(f"top_p must lie in (0, 1], got {sampling.top_p}")
    if not 0 <= sampling.min_p <= 1:
        raise ValueError(f"min_p must lie in [0, 1], got {sampling.min_p}")
    if sampling.top_k < 0:
        raise ValueError(f"top_k must be at least 0 (no limit), got {sampling.top_k}")
    if sampling.max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {sampling.max_tokens}")


_COLUMNS = (
    ("temperature", torch.float32),
    ("top_p", torch.float32),
    ("top_k", torch.int64),
    ("min_p", torch.float32),
)


@dataclass(slots=True)
class RowSampling:
    """Sampling settings of N rows, on one device.

    Three facts are known on the host, so that what no row needs is not computed: ``truncated``, whether any row
    cuts the distribution (else the vocabulary is not sorted); ``any_greedy``; ``scaled``, whether any temperature
    is not 1. ``max_top_k`` is the largest top-k where every truncated row has one, else 0.
    """

    temperature_N: torch.Tensor  # float32; 1 for greedy rows
    top_p_N: torch.Tensor  # float32; 1: no limit
    top_k_N: torch.Tensor  # int64; 0: no limit
    min_p_N: torch.Tensor  # float32; 0: no limit
    greedy_N: torch.Tensor  # bool
    truncated: bool
    max_top_k: int
    any_greedy: bool = True
    scaled: bool = True

    @classmethod
    def build(cls, rows: Sequence[SamplingParams], device: torch.device | str = "cpu") -> RowSampling:
        """One row for each of ``rows``. A greedy row ignores top-p, top-k and min-p."""
        greedy = torch.tensor([r.temperature == 0 for r in rows], dtype=torch.bool)
        temperature, top_p, top_k, min_p = (
            torch.tensor([getattr(r, name) for r in rows], dtype=dtype) for name, dtype in _COLUMNS
        )
        temperature[greedy], top_p[greedy], top_k[greedy], min_p[greedy] = 1.0, 1.0, 0, 0.0
        return cls._summarised(temperature, top_p, top_k, min_p, greedy, device)

    @classmethod
    def _summarised(
        cls,
        temperature: torch.Tensor,
        top_p: torch.Tensor,
        top_k: torch.Tensor,
        min_p: torch.Tensor,
        greedy: torch.Tensor,
        device: torch.device | str,
    ) -> RowSampling:
        cut = (top_p < 1) | (top_k > 0) | (min_p > 0)
        truncated = bool(cut.any())
        max_top_k = int(top_k.max()) if truncated and bool((top_k[cut] > 0).all()) else 0
        columns = [c.to(device) for c in (temperature, top_p, top_k, min_p, greedy)]
        return cls(*columns, truncated, max_top_k, bool(greedy.any()), bool((temperature != 1).any()))

    def take(self, index_N: torch.Tensor, device: torch.device | str) -> RowSampling:
        """These rows of a table that lives on the host."""
        columns = (self.temperature_N, self.top_p_N, self.top_k_N, self.min_p_N, self.greedy_N)
        return RowSampling._summarised(*(c[index_N] for c in columns), device)

    def set(self, row: int, other: RowSampling) -> None:
        """Overwrite one row of a table that lives on the host with the only row of ``other``.

        The table's own host-side facts are not kept up: `take` computes them.
        """
        self.temperature_N[row], self.top_p_N[row] = other.temperature_N[0], other.top_p_N[0]
        self.top_k_N[row], self.min_p_N[row] = other.top_k_N[0], other.min_p_N[0]
        self.greedy_N[row] = other.greedy_N[0]


def _kept_threshold_N(scaled_NV: torch.Tensor, rows: RowSampling) -> torch.Tensor:
    """Smallest logit that each row keeps, after min-p, top-k and top-p in this order.

    Tokens tied with the smallest kept one are kept too, so the kept set does not depend on a sort's order.
    """
    max_N1, vocab = scaled_NV.amax(-1, keepdim=True), scaled_NV.shape[-1]
    width = min(rows.max_top_k, vocab) or vocab
    sorted_NV = torch.topk(scaled_NV, width, sorted=True).values
    # By position, not by value: ties with the k-th would make the mass depend on `width`: on the batch.
    last_kept_N1 = torch.where(rows.top_k_N > 0, rows.top_k_N, width).clamp(max=width)[:, None] - 1
    cut_NV = torch.arange(width, device=scaled_NV.device) > last_kept_N1
    min_p_threshold_N1 = max_N1 + rows.min_p_N.log()[:, None]  # log 0 = -inf keeps all
    cut_NV = cut_NV | (sorted_NV < min_p_threshold_N1)
    mass_NV = (sorted_NV - max_N1).double().exp().masked_fill(cut_NV, 0.0)
    cumulative_NV = mass_NV.cumsum(-1)
    total_N1 = cumulative_NV.gather(-1, last_kept_N1)
    outside_NV = (cumulative_NV - mass_NV >= rows.top_p_N[:, None] * total_N1) & (rows.top_p_N < 1)[:, None]
    smallest_N = sorted_NV.masked_fill(cut_NV | outside_NV, torch.inf).amin(-1)
    no_cut_N = (rows.top_p_N == 1) & (rows.top_k_N == 0) & (rows.min_p_N == 0)
    return smallest_N.masked_fill(no_cut_N, -torch.inf)


def processed_logprobs(logits_NV: torch.Tensor, rows: RowSampling) -> torch.Tensor:
    """Log-probs [N, V] float32 of the distribution that is drawn from; -inf where a token was cut."""
    scaled_NV = logits_NV.float()
    if rows.scaled:
        scaled_NV = scaled_NV / rows.temperature_N[:, None]
    if rows.truncated:
        threshold_N = _kept_threshold_N(scaled_NV, rows)
        scaled_NV = scaled_NV.masked_fill(scaled_NV < threshold_N[:, None], -torch.inf)
    return scaled_NV.log_softmax(-1)


def sample(
    logits_NV: torch.Tensor, rows: RowSampling, uniform_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [N] int64 and their log-probs [N] float32, one draw ``uniform_N`` (float64 in [0, 1)) for a row.

    The token is the first whose cumulative probability exceeds the draw, in the order of the vocabulary.
    A row with a NaN yields a NaN log-prob, which the caller must look at.
    """
    logprobs_NV = processed_logprobs(logits_NV, rows)
    tokens_N = _draw(logprobs_NV, uniform_N)
    if rows.any_greedy:
        tokens_N = torch.where(rows.greedy_N, logits_NV.argmax(-1), tokens_N)
    return tokens_N, logprobs_NV.gather(-1, tokens_N[:, None])[:, 0]


_PIECES = (512, 256, 128)
"""Tokens whose probabilities are summed at once, before the one piece that holds the draw is looked into: the first
of these that divides the vocabulary, since filling it up would copy it."""


def _draw(logprobs_NV: torch.Tensor, uniform_N: torch.Tensor) -> torch.Tensor:
    """Inverse of the cumulative distribution in two levels: which piece of the vocabulary, then which token of it.

    Sums are float64 throughout. A running sum over the whole vocabulary would move five times the bytes.
    """
    rows, vocab = logprobs_NV.shape
    width = next((w for w in _PIECES if vocab % w == 0), _PIECES[0])
    pieces = -(-vocab // width)
    probability_NV = logprobs_NV.exp()
    if pieces * width > vocab:
        probability_NV = F.pad(probability_NV, (0, pieces * width - vocab))
    probability_NPW = probability_NV.view(rows, pieces, width)
    cumulative_NP = probability_NPW.sum(-1, dtype=torch.float64).cumsum(-1)
    total_N = cumulative_NP[:, -1]
    # Rounding may carry u * total up to the total itself, past the last token.
    target_N = torch.minimum(uniform_N * total_N, torch.nextafter(total_N, torch.zeros_like(total_N)))
    piece_N1 = torch.searchsorted(cumulative_NP, target_N[:, None], right=True).clamp(max=pieces - 1)
    chosen_NW = probability_NPW.gather(1, piece_N1[..., None].expand(-1, -1, width))[:, 0]
    before_N1 = cumulative_NP.gather(-1, piece_N1) - chosen_NW.sum(-1, keepdim=True, dtype=torch.float64)
    within_NW = before_N1 + chosen_NW.cumsum(-1, dtype=torch.float64)
    token_N1 = torch.searchsorted(within_NW, target_N[:, None], right=True)
    # Where rounding puts the draw past its piece, it is that piece's last possible token.
    last_N1 = (
        (chosen_NW > 0).long().mul(torch.arange(width, device=chosen_NW.device)).argmax(-1, keepdim=True)
    )
    return (piece_N1 * width + torch.minimum(token_N1, last_N1))[:, 0]


def token_logprobs(logits_NV: torch.Tensor, tokens_N: torch.Tensor) -> torch.Tensor:
    """Log-probs [N] float32 of ``tokens_N`` at temperature 1 over the whole vocabulary.

    Same operation, row by row, as `processed_logprobs` at temperature 1, hence the same bits.
    """
    return logits_NV.float().log_softmax(-1).gather(-1, tokens_N[:, None])[:, 0]
