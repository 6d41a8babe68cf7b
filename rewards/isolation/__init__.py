"""Processes that can be killed: `pool` is the caller's side, `zygote` forks, `child` runs the reward."""
