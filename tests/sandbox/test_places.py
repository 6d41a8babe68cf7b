"""The quota serves in order, loses no place, and warm sandboxes never stand in a trajectory's way."""

from __future__ import annotations

import asyncio
import random

import pytest

from sandbox_client.places import Places


class Warm:
    """As far as the quota is concerned, a sandbox is a thing."""


async def test_a_warm_one_that_becomes_ready_goes_to_who_waits() -> None:
    places = Places(1)
    assert places.take_spare()  # it is being made
    waiting = asyncio.ensure_future(places.take(5.0))
    await asyncio.sleep(0)
    made = Warm()
    places.ready(made)
    assert await waiting is made
    assert places.taken == 1
    assert not places.warm


async def test_empty_places_go_before_warm_ones_are_evicted() -> None:
    places = Places(2)
    assert places.take_spare()
    places.ready(made := Warm())
    assert await places.take(1.0) is None
    assert await places.take(1.0) is made
    with pytest.raises(TimeoutError):
        await places.take(0.01)
    assert places.taken == 2


async def test_who_asks_first_is_served_first() -> None:
    places, order = Places(1), []
    await places.take(1.0)

    async def one(n: int) -> None:
        await places.take(5.0)
        order.append(n)
        places.free()

    tasks = [asyncio.ensure_future(one(n)) for n in range(5)]
    await asyncio.sleep(0)
    assert not places.take_spare()
    places.free()
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2, 3, 4]
    assert places.taken == 0


@pytest.mark.parametrize("seed", range(20))
async def test_no_place_is_lost_however_calls_are_cancelled(seed: int) -> None:
    rng, places = random.Random(seed), Places(3)

    async def user() -> None:
        await places.take(rng.choice([0.001, 5.0]), wants_warm=rng.random() < 0.5)
        try:
            await asyncio.sleep(rng.random() * 0.002)
        finally:
            places.free()

    async def pool() -> None:
        while True:
            if len(places.warm) < 2 and places.take_spare():
                try:
                    await asyncio.sleep(0)
                except asyncio.CancelledError:
                    places.free()
                    raise
                places.ready(Warm())
            await asyncio.sleep(0.0005)

    filling = asyncio.ensure_future(pool())
    users = [asyncio.ensure_future(user()) for _ in range(40)]
    for _ in range(30):
        await asyncio.sleep(rng.random() * 0.001)
        rng.choice(users).cancel()
        assert 0 <= places.taken <= 3
    await asyncio.gather(*users, return_exceptions=True)
    filling.cancel()
    await asyncio.gather(filling, return_exceptions=True)
    assert places.taken == len(places.warm)
