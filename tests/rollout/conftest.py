from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session")
def ray_session():
    """One Ray for all tests of a session; whoever started it already keeps it."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    import ray

    mine = not ray.is_initialized()
    if mine:
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield ray
    if mine:
        ray.shutdown()
