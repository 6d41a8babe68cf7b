"""Weights arrive whole or not at all: every transport on the CPU, every way in which a delivery can be
wrong.
"""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from k3rl.errors import RunError, UserError
from k3rl.models import ModelConfig, build_model
from k3rl.weights import Handshake, Publisher, checksum, deliver, make_transport, receive, verify
from k3rl.weights.publication import Ack, Canary
from k3rl.weights.transports import Disk, Shm


class ModelEngine:
    """The two engine calls that a delivery needs, on a real model: strict load, and scores in float32."""

    def __init__(self, seed=99, dtype=torch.float32):
        self.model = build_model(ModelConfig(path="k3-nano"), seed, dtype=dtype)
        self.version = -1

    def load_weights(self, weights, version):
        self.model.load_named_weights(weights)
        self.version = version

    @torch.no_grad()
    def score(self, sequences, starts):
        rows = []
        for ids, start in zip(sequences, starts, strict=True):
            ids_T = torch.tensor(ids)
            logp = self.model.logits(self.model(ids_T, torch.tensor([0, len(ids)]))).log_softmax(-1)
            picked = logp[:-1].gather(1, ids_T[1:, None]).squeeze(1)
            rows.append(picked[start - 1 :].tolist())
        return rows

    def stats(self):
        return self  # `version` is all that a delivery reads


def identity(x):
    return x


def canary_of(model) -> Canary:
    engine = ModelEngine()
    engine.model = model
    sequences = ((3, 17, 42, 5, 99), (7, 7, 300))
    return Canary(sequences, (1, 2), tuple(tuple(r) for r in engine.score(sequences, (1, 2))))


@pytest.fixture(scope="module")
def model():
    return build_model(ModelConfig(path="k3-nano"), 1)


@pytest.mark.parametrize("name", ["shm", "disk", "gloo"])
@pytest.mark.parametrize("bucket_bytes", [1 << 16, 1 << 28])
def test_each_transport_delivers_the_same_model(model, name, bucket_bytes, tmp_path):
    options = {
        "shm": {"put": identity},
        "disk": {"root": tmp_path},
        "gloo": {"receivers": 2},
    }[name]
    publisher = Publisher(make_transport(name, bucket_bytes=bucket_bytes, **options))
    publication = publisher.publish(model.named_weights(), 3, canary_of(model))
    engines = [ModelEngine(5), ModelEngine(6)]
    acks: list[Ack | None] = [None, None]

    def load(i):
        acks[i] = deliver(publication, engines[i], receiver=f"engine {i}", get=identity)

    threads = [threading.Thread(target=load, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    metrics = verify(publication, [a for a in acks if a], tolerance=1e-6)
    publisher.close()
    assert metrics["weights/canary_gap"] < 1e-6
    assert metrics["weights/bytes"] == sum(w.nbytes for _, w in model.named_weights())
    for engine in engines:
        assert engine.version == 3
        for (n1, a), (n2, b) in zip(engine.model.named_weights(), model.named_weights(), strict=True):
            assert n1 == n2
            assert torch.equal(a, b)


def test_bfloat16_and_float32_tensors_keep_their_own_dtype(tmp_path):
    """spec/10 row 65: a router's float32 bias cast with the rest loses its distinct values."""
    model = build_model(ModelConfig(path="k3-nano"), 1, dtype=torch.bfloat16)
    biases = [t for n, t in model.named_weights() if n.endswith("e_score_correction_bias")]
    for b in biases:
        b.copy_(torch.linspace(1.0, 1.001, b.numel()))
    engine = ModelEngine(dtype=torch.bfloat16)
    deliver(Publisher(Shm(put=identity)).publish(model.named_weights(), 1), engine, get=identity)
    got = [t for n, t in engine.model.named_weights() if n.endswith("e_score_correction_bias")]
    for a, b in zip(got, biases, strict=True):
        assert a.dtype is torch.float32
        assert len(a.unique()) == a.numel()
        assert torch.equal(a, b)


def published(model, version=1, **changes):
    publication = Publisher(Shm(put=identity)).publish(model.named_weights(), version, canary_of(model))
    return replace(publication, **changes)


def delivered(publication, engine=None):
    return deliver(publication, engine or ModelEngine(), receiver="engine 0", get=identity)


def test_an_engine_that_keeps_its_old_weights_is_found_out(model):
    class Deaf(ModelEngine):
        def load_weights(self, weights, version):
            list(weights)  # takes the bytes, acknowledges the version, serves the old policy
            self.version = version

    publication = published(model)
    ack = delivered(publication, Deaf())
    with pytest.raises(RunError, match=r"scores the canary prompt .* nats away"):
        verify(publication, [ack])


def test_one_tensor_that_was_not_copied_is_found_out(model):
    class Partial(ModelEngine):
        def load_weights(self, weights, version):
            before = self.model.model.layers[1].self_attn.o_proj.weight.clone()
            super().load_weights(weights, version)
            self.model.model.layers[1].self_attn.o_proj.weight.data.copy_(before)

    publication = published(model)
    with pytest.raises(RunError, match="did not arrive whole"):
        verify(publication, [delivered(publication, Partial())])


def test_wrong_versions_bytes_and_silence_are_refused(model):
    publication = published(model, version=4)
    ack = delivered(publication)
    verify(publication, [ack])
    with pytest.raises(RunError, match="serves weights version 3 after 4"):
        verify(publication, [ack, replace(ack, version=3)])
    with pytest.raises(RunError, match="other bytes"):
        verify(publication, [replace(ack, checksum="0" * 32)])
    with pytest.raises(RunError, match="no engine took it"):
        verify(publication, [])
    nan = replace(ack, canary_logprobs=((float("nan"),) * 4, (0.0,)))
    with pytest.raises(RunError, match="inf nats away"):
        verify(publication, [nan])


def test_the_same_bytes_again_are_refused_unless_nothing_was_trained(model):
    """spec/10 row 19: the frozen base was published each time, and it looked like staleness for two
    months.
    """
    first, second = published(model, 1), published(model, 2)
    ack = delivered(second)
    with pytest.raises(RunError, match="byte for byte version 1"):
        verify(second, [ack], first)
    verify(second, [ack], first, changed=False)


def test_missing_doubled_and_misshapen_tensors_are_refused(model):
    publication = published(model)
    with pytest.raises(ValueError, match="announced"):
        list(receive(replace(publication, tensors=publication.tensors[:-1]), get=identity))
    short = replace(publication, payload=[publication.payload[0][:-1]])
    with pytest.raises(ValueError, match="didn't come"):
        list(receive(short, get=identity))
    engine = ModelEngine()
    before = checksum(engine.model.named_weights())
    with pytest.raises(ValueError, match="didn't come"):
        delivered(short, engine)
    assert checksum(engine.model.named_weights()) == before  # atomic: the engine goes on with what it had
    doubled = [*model.named_weights(), next(iter(model.named_weights()))]
    with pytest.raises(ValueError, match="published twice"):
        Publisher(Shm(put=identity)).publish(iter(doubled), 1)


def test_handshake_names_the_field_that_differs(model):
    ours = Handshake(quantisation="mxfp4 experts", sampling="processed; temperature=1.0", vocab_size=512)
    publication = Publisher(Shm(put=identity), ours).publish(model.named_weights(), 1)
    deliver(publication, ModelEngine(), handshake=Handshake(vocab_size=512), get=identity)
    theirs = replace(ours, sampling="raw; temperature=1.0")
    with pytest.raises(RunError, match=r"sampling: 'processed; temperature=1\.0' here, 'raw"):
        deliver(publication, ModelEngine(), receiver="engine 2", handshake=theirs, get=identity)


def test_disk_keeps_one_publication(model, tmp_path):
    publisher = Publisher(Disk(tmp_path))
    for version in (1, 2):
        publication = publisher.publish(model.named_weights(), version)
    assert [str(p) for p in tmp_path.iterdir()] == [publication.payload]
    publisher.close()
    assert list(tmp_path.iterdir()) == []


def test_checksum_sees_a_flipped_bit_a_swap_and_a_dtype():
    a = torch.arange(3_000_003, dtype=torch.float32)
    base = checksum([("a", a)])
    flipped = a.clone()
    flipped.view(torch.int32)[2_999_999] ^= 1
    swapped = a.clone()
    swapped[[4, 2_500_000]] = swapped[[2_500_000, 4]]
    moved = a.roll(2)
    others = [checksum([("a", x)]) for x in (flipped, swapped, moved, a.view(torch.int32), a.view(3, -1))]
    assert len({base, *others, checksum([("b", a)])}) == 7
    assert checksum([("a", a.clone())]) == base
    assert checksum([("x", a[1:])]) == checksum([("x", a[1:].clone())])  # alignment doesn't matter


def test_unknown_transport_is_named():
    with pytest.raises(UserError, match="did you mean 'disk'"):
        make_transport("disc")
