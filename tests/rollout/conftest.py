from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def ray_session():
    """A Ray of this module's own: actors that other tests left behind would hold the cores."""
    import ray

    ray.shutdown()
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield ray
    ray.shutdown()
