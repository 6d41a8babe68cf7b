"""Post-training of language models as Kimi K3's. `k3rl.types` is the first file to read."""

import os

# Ray starts or joins a cluster where `k3rl.recipes.launch.ray_cluster` says so, and nowhere else.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
