"""Built-in verifiers, one file for each family. Names are in `rewards.registry.BUILT_IN`."""
