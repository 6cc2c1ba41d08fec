"""A world in which an old release is live and a new one gated: where every test of the shift begins."""

from __future__ import annotations

import copy
from functools import cache

import pytest

from tasks.core.lease import LEASE
from tasks.core.route import LIVE_ROUTE, RouteState
from tasks.steps.holder import TrafficHolder
from tasks.steps.traffic import read_live_route
from tests.fakes.pipeline import bring_up, make_live, shift
from tests.fakes.small_world import Death, Faults, World, release

OLD, NEW = release("k2-old-1"), release("k2-new-1", args={"decode-log-interval": 7})


@cache
def gated():
    world = World()
    return world, make_live(world.ports("run-old"), OLD), bring_up(world.ports("run-new"), NEW)


class Shifting:
    """A world with an old release live and a new one gated."""

    def __init__(self):
        self.world, self.old, self.new = copy.deepcopy(gated())
        self.old_set, self.new_set = (self.world.engine.sets[s.serving] for s in (self.old, self.new))

    def shift(self, run="run-1", faults=None):
        return shift(self.world.ports(run, faults), self.new)

    @property
    def state(self) -> RouteState:
        return read_live_route(self.world.ports())[0]

    def weights(self):
        """Return the percentages of (old, new) as the gateway reads them."""
        weights = self.world.live_weights()
        return weights.get(self.old.router_service, 0), weights.get(self.new.router_service, 0)

    def watch_weights(self):
        """Return the list of the candidate's weights that the route ever has from now on."""
        seen = [self.weights()[1]]

        def note(verb, obj):
            if obj["metadata"]["name"] == LIVE_ROUTE and self.weights()[1] != seen[-1]:
                seen.append(self.weights()[1])

        self.world.cluster.controllers.append(note)
        return seen

    def die_at(self, percent, run):
        """Shift until the candidate has this weight, and be killed in its bake."""
        faults = Faults(10**9)
        self.at_weight(percent, faults.kill)
        with pytest.raises(Death):
            self.shift(run, faults)
        assert self.weights()[1] == percent

    def at_weight(self, percent, act):
        """Do something once the candidate has this weight and the next sleep ends."""
        done = []

        def react(now):
            if not done and self.weights()[1] >= percent:
                done.append(now)
                act()

        self.world.clock.on_sleep.append(react)


def edit_weights(world, *weights):
    def change(obj):
        for rule in obj["spec"]["rules"]:
            for ref, weight in zip(rule["backendRefs"], weights, strict=False):
                ref["weight"] = weight

    world.cluster.edit("HTTPRoute", LIVE_ROUTE, change)


def holding_of(world, run, *, force=False):
    holder = TrafficHolder(world.ports(run))
    if force:

        def give_up(obj):
            obj["spec"]["holderIdentity"] = ""

        world.cluster.edit("Lease", LEASE, give_up)
    holder.acquire(world.site.lease_duration_s + 5)
    return holder
