"""The printed table shows every number, however many models there are."""

from typing import Any

import pytest

from k3rl.recipes.evaluate import print_table


def cells(stages: list[str]) -> list[dict[str, Any]]:
    domains = [(d, e) for d in ("agent", "coding", "general") for e in ("low", "high", "max")]
    return [
        {
            "domain": d,
            "effort": e,
            "stage": s,
            "reward": (100 * i + j) / 1000,
            "thinking_tokens": 10 * i + j + 0.5,
        }
        for i, s in enumerate(stages)
        for j, (d, e) in enumerate(domains)
    ]


@pytest.mark.parametrize("models", [2, 8])
def test_every_number_is_there_unshortened(models: int, capsys: pytest.CaptureFixture[str]) -> None:
    stages = [f"model-{i}" for i in range(models)]
    print_table(cells(stages), stages)
    words = capsys.readouterr().out.split()
    for cell in cells(stages):
        assert f"{cell['reward']:.3f}" in words
        assert f"{cell['thinking_tokens']:.1f}" in words
    assert "…" not in "".join(words)


def test_a_cell_that_a_model_lacks_is_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    stages = ["a", "b", "c", "d"]
    print_table([c for c in cells(stages) if (c["stage"], c["effort"]) != ("d", "low")], stages)
    last = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip().startswith("d")]
    assert len(last) == 2
    assert all(line.count("-") == 3 for line in last)
