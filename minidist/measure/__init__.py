"""What really happened: memory by kind, bytes by collective, a timeline, benchmarks against torch.

Everything but the three names below is imported from its own module, so that a strategy that calls
`tag` does not load the rest.
"""

from __future__ import annotations

from minidist.measure.memory import tag
from minidist.measure.timeline import span

__all__ = ["measure", "span", "tag"]


def measure(*existing, memory: bool = True, traffic: bool = True, timeline: bool = True):
    from minidist.measure.meter import measure as open_measurement

    return open_measurement(*existing, memory=memory, traffic=traffic, timeline=timeline)
