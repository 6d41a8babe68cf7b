from __future__ import annotations

import pytest

from k3rl.chat import XtmlRenderer, load_renderer


@pytest.fixture(scope="session")
def nano() -> XtmlRenderer:
    renderer = load_renderer("k3-nano")
    assert isinstance(renderer, XtmlRenderer)
    return renderer


@pytest.fixture(scope="session")
def nano_hosted() -> XtmlRenderer:
    """The nano renderer whose prompts end at the message opener."""
    renderer = load_renderer("k3-nano", convention="message")
    assert isinstance(renderer, XtmlRenderer)
    return renderer
