"""Experts that an engine holds packed: the trainer's numbers, a quarter of the bytes, the released names."""

import copy
import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from k3rl.config.trainer import TrainerConfig
from k3rl.models import ModelConfig, build_model, load_model
from k3rl.models.k3.moe import Experts
from k3rl.quant.config import QatConfig
from k3rl.quant.export import Packer
from k3rl.quant.mx import pack_mxfp4, quantise_mxfp4, unpack_mxfp4
from k3rl.quant.mx_grouped import OUTPUTS, SOURCE, grouped_linear_mxfp4, row_blocks
from k3rl.quant.packed import PackedExperts, pack_experts, packed_weights
from k3rl.trainer.worker import TrainerWorker
from k3rl.weights import deliver, verify
from k3rl.weights.transports import Shm
from rollout.engine import Generation, SamplingParams
from rollout.native import NativeEngine

QAT = ModelConfig(overrides={"num_hidden_layers": 2, "attn_res_block_size": 1}, qat=QatConfig())


def drawn(seed: int, length: int) -> list[int]:
    return torch.randint(3, 500, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("rule", ["ceil", "even"])
@pytest.mark.parametrize("lengths", [[7], [40, 300]])
@pytest.mark.parametrize("read_codes", [False, True])
def test_packing_changes_no_bit_of_the_forward_pass(rule, lengths, read_codes):
    model = build_model(QAT.model_copy(update={"qat": QatConfig(rule=rule)}), seed=3).requires_grad_(False)
    packed = copy.deepcopy(model)
    assert pack_experts(packed, read_codes) == sum(isinstance(m, PackedExperts) for m in packed.modules()) > 0
    ids = torch.tensor(drawn(0, sum(lengths)))
    cuts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)])
    assert torch.equal(model(ids, cuts), packed(ids, cuts))


def test_names_and_bytes_are_those_of_an_exported_checkpoint():
    model = build_model(QAT, seed=4)
    exported = dict(Packer().packed(model.named_weights()))
    sent = dict(packed_weights(model.named_weights()))
    pack_experts(model)
    held = dict(model.named_weights())
    assert held.keys() == sent.keys() == exported.keys()
    parts = [n for n in held if n.endswith(("weight_packed", "weight_scale"))]
    assert len(parts) > 10
    for name in parts:
        assert torch.equal(held[name], sent[name]), name
        assert torch.equal(held[name], exported[name]), name


def test_a_packed_publication_arrives_and_the_engine_agrees_with_the_trainer():
    trainer = TrainerWorker(
        QAT, TrainerConfig(), seed=5, device="cpu", transport=Shm(put=lambda x: x), packed=True
    )
    with torch.no_grad():  # the engine starts from other weights
        for parameter in trainer.model.parameters():
            parameter.mul_(1.01)
    loaded = load_model(QAT, seed=5).requires_grad_(False)
    whole = sum(t.nbytes for n, t in loaded.named_weights() if ".experts." in n)
    pack_experts(loaded)
    engine = NativeEngine(loaded, max_slots=8, max_context=256)
    publication = trainer.publication()
    assert publication is not None
    sent = sum(t.nbytes for t in publication.tensors if ".experts." in t.name)
    assert sent == whole * (4.25 / 32)  # from float32: 4 bits and a scale byte per 32
    ack = deliver(publication, engine, receiver="engine", get=lambda x: x)
    assert verify(publication, [ack], tolerance=1e-5)["weights/canary_gap"] < 1e-5
    generations = [
        Generation(str(i), drawn(i, 5 + 9 * i), SamplingParams(max_tokens=48), i) for i in range(8)
    ]
    engine.submit(generations)
    while engine.pending():
        engine.step()
    for g in generations:
        scored = trainer.score_ids([g.context_ids + g.token_ids], [len(g.context_ids)])[0]
        torch.testing.assert_close(torch.tensor(scored), torch.tensor(g.logprobs), atol=1e-5, rtol=0)


@pytest.mark.parametrize("packs", [False, True])
def test_kept_values_are_renewed_in_their_place_as_weights_are_loaded(packs):
    """A CUDA graph reads the tensors that were there when it was captured, and runs no Python."""
    model, other = (build_model(QAT, seed=seed).requires_grad_(False) for seed in (0, 1))
    if packs:
        pack_experts(model)
        pack_experts(other)
    experts = next(m for m in model.modules() if isinstance(m, Experts))
    theirs = next(m for m in other.modules() if isinstance(m, Experts))
    before = experts.matrices()
    assert not torch.equal(before[0], theirs.matrices()[0])
    model.load_named_weights(other.named_weights())
    for seen, expected in zip(before, theirs.matrices(), strict=True):
        assert torch.equal(seen, expected)


def test_what_is_not_quantised_is_not_published_packed():
    plain = QAT.model_copy(update={"qat": None})
    with pytest.raises(ValueError, match="nothing to publish packed"):
        TrainerWorker(plain, TrainerConfig(), device="cpu", packed=True)


def test_dropped_weights_come_back_as_nan():
    model = load_model(QAT, seed=0).requires_grad_(False)
    pack_experts(model)
    engine = NativeEngine(model, max_slots=1, max_context=64)
    engine.sleep(2)
    engine.wake()
    experts = next(m for m in model.modules() if isinstance(m, PackedExperts))
    assert all(w.isnan().all() for w in experts.matrices())


EMULATED = """
#include "emulated_cuda.h"
#include "mx_grouped.cu"
static const unsigned short* x;
static const unsigned char *codes, *scales;
static unsigned short* out;
static const int *expert, *start, *ends;
static int N, K;
extern "C" void run(void** tensors, int n, int k, int grid_x, int grid_y) {
  x = (unsigned short*)tensors[0], codes = (unsigned char*)tensors[1], scales = (unsigned char*)tensors[2];
  out = (unsigned short*)tensors[3], expert = (int*)tensors[4], start = (int*)tensors[5], ends = (int*)tensors[6];
  N = n, K = k;
  launch(grid_x, grid_y, [] { grouped_linear_mxfp4(x, codes, scales, out, expert, start, ends, N, K); });
}
"""


def cuda(tensors):
    return tuple(t.cuda() for t in tensors)


@pytest.fixture(scope="module")
def grouped_linear(tmp_path_factory):
    """The kernel: on a GPU itself, else its source compiled for the CPU, with tensor cores spelled out."""
    if torch.cuda.is_available():
        return lambda *tensors: grouped_linear_mxfp4(*cuda(tensors[:4]), cuda(tensors[4])).cpu()
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("neither a GPU nor g++")
    folder = tmp_path_factory.mktemp("emulated")
    (folder / "kernel.cpp").write_text(EMULATED)
    paths = ["-I", str(Path(__file__).parent), "-I", str(SOURCE.parent)]
    options = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", *paths, "-o", "kernel.so"]
    subprocess.run([compiler, *options, "kernel.cpp"], check=True, cwd=folder)
    library = ctypes.CDLL(str(folder / "kernel.so"))

    def emulated(x, codes, scale, ends, blocks):
        (A, K), N = x.shape, codes.shape[1]
        out = torch.full((A, N), torch.nan, dtype=torch.bfloat16)
        tensors = (x, codes, scale, out, *blocks, ends)
        pointers = (ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors))
        library.run(pointers, N, K, -(-N // OUTPUTS), len(blocks[0]))
        return out

    return emulated


@pytest.mark.parametrize(
    ("N", "K", "counts"),
    [(48, 64, [0, 3, 17, 1, 0]), (40, 320, [33, 0, 2]), (16, 32, [0, 0, 0, 1]), (16, 2304, [9])],
)
def test_the_kernel_that_reads_codes_multiplies_as_unpacked_weights_do(grouped_linear, N, K, counts):
    E, A = len(counts), sum(counts)
    weight = torch.randn(E, N, K) * 2.0 ** torch.randint(-8, 8, (E, N, 1))
    codes, scale = quantise_mxfp4(weight)
    ends = torch.tensor(counts).cumsum(0).int()
    x = torch.randn(A, K).bfloat16()
    out = grouped_linear(x, codes, scale, ends, row_blocks(ends, A)).double()
    dense = unpack_mxfp4(codes, scale, torch.float64)
    expert = torch.repeat_interleave(torch.arange(E), torch.tensor(counts))
    exact = torch.einsum("ak,ank->an", x.double(), dense[expert])
    bound = 2**-7 * exact.abs() + 1e-5 * torch.einsum("ak,ank->an", x.double().abs(), dense[expert].abs())
    assert ((out - exact).abs() <= bound).all()


def test_the_kernel_decodes_every_code_under_every_scale(grouped_linear):
    """One row that picks one input: the sum is that weight, and its bits are the ones that `unpack_mxfp4` gives."""
    scale = torch.arange(256, dtype=torch.uint8).reshape(1, 256, 1)
    codes = pack_mxfp4((torch.arange(32) % 16).to(torch.uint8)).expand(1, 256, -1).contiguous()
    x = torch.eye(32, dtype=torch.bfloat16)[:16]
    ends = torch.tensor([16], dtype=torch.int32)
    found = grouped_linear(x, codes, scale, ends, row_blocks(ends, 16))
    expected = unpack_mxfp4(codes, scale)[0].T[:16]
    finite = expected.isfinite().all(0)  # a block with an infinity or NaN makes all sums over it NaN
    assert finite.sum() >= 253
    assert torch.equal(found[:, finite], expected[:, finite])
    assert found[:, ~finite].isnan().all()
