"""Which sandboxes and snapshots of a run are nobody's any more."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from sandbox_client import owners
from sandbox_client.owners import Owner, digest, snapshot_owner
from sandbox_client.types import Backend

Dead = Collection[str] | Literal["all"]
"""Names of owners that are gone for certain; or ``"all"`` but the asking fleet, the only process of its run."""


def ids(keep: Mapping[str, Any]) -> set[str]:
    """Of sandboxes and snapshots: the keys, and what the values name that are records."""
    records = [value for value in keep.values() if isinstance(value, Mapping)]
    named = {str(r[key]) for r in records for key in ("id", "snapshot") if r.get(key)}
    return set(keep) | named


def is_dead(maker: Owner, me: Owner, dead: Dead) -> bool:
    """Whether ``maker`` is gone: said to be, an earlier life of ``me``, or a process of this machine that is no
    more. Both owners in the same form, plain or digested; ``dead`` likewise.

    What is known to live stays unless it is named: two workers that got the same name by mistake spare each other.
    """
    if maker.instance == me.instance:
        return False
    if dead == "all" or maker.name in dead:
        return True
    living = owners.alive(maker.instance)
    return living is False or (living is None and maker.name == me.name)


async def orphan_sandboxes(backend: Backend, me: Owner, kept: set[str], dead: Dead) -> list[str]:
    found = await backend.list({owners.RUN_KEY: me.run})
    return [i.id for i in found if i.id not in kept and is_dead(Owner.of(i.metadata), me, dead)]


async def orphan_snapshots(
    backend: Backend, me: Owner, kept: set[str], dead: Dead, *, own: bool = False
) -> list[str]:
    """Those that a fleet named (`Owner.snapshot_name`); not the ones in ``kept``, nor any of a kept sandbox.
    ``own``: those of ``me`` as well."""
    sandboxes, digested = {digest(i) for i in kept}, me.digested()
    gone: Dead = dead if dead == "all" else {digest(name) for name in dead}
    orphans = []
    for snapshot in await backend.list_snapshots():
        maker, sandbox = next(filter(None, map(snapshot_owner, snapshot.names)), (None, ""))
        if maker is None or maker.run != digested.run or snapshot.id in kept or sandbox in sandboxes:
            continue
        if is_dead(maker, digested, gone) or (own and maker.instance == me.instance):
            orphans.append(snapshot.id)
    return orphans
