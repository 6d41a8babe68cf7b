"""What two processes that exchange weights and tokens must agree on, and how they disagree."""

from __future__ import annotations

from dataclasses import dataclass, fields

from k3rl.errors import RunError


@dataclass(frozen=True, slots=True)
class Handshake:
    """An empty field wasn't stated and is not compared.

    ``dtypes``       (name, dtype) of every tensor, or a digest of them
    ``quantisation`` the scheme and where it applies, whole module paths
    ``sampling``     what behaviour log-probs mean, for instance ``processed; temperature=1.0; top_p=1.0``
    ``tokenizer``    `Renderer.fingerprint`: vocabulary content and template
    ``vocab_size``   rows of the head; 0: not stated
    """

    dtypes: str = ""
    quantisation: str = ""
    sampling: str = ""
    tokenizer: str = ""
    vocab_size: int = 0

    def differences(self, other: Handshake) -> list[str]:
        """One sentence per field in which both state something, and not the same."""
        out = []
        for f in fields(self):
            mine, theirs = getattr(self, f.name), getattr(other, f.name)
            if mine and theirs and mine != theirs:
                out.append(f"{f.name}: '{mine}' here, '{theirs}' there")
        return out

    def require(self, other: Handshake, who: str) -> None:
        """`RunError` where they differ."""
        found = self.differences(other)
        if found:
            raise RunError(f"trainer and {who} don't agree on {'; '.join(found)}")
