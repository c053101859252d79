"""What really happened: memory by kind, bytes by collective, a timeline, benchmarks against torch.

    with md.measure(model, optimizer) as m:
        train_step()
    print(m.memory, m.traffic)
    m.timeline.save("trace.json")        # https://ui.perfetto.dev

`tag` and `span` are for strategies: what a piece of memory is, what a piece of time was.
"""

from __future__ import annotations

from minidist.measure.memory import tag
from minidist.measure.meter import measure
from minidist.measure.timeline import span

__all__ = ["measure", "span", "tag"]
