"""What would happen: the planner, the simulator of one step, and the published arithmetic behind
both.

Nothing here needs a process group or a GPU, and only `dryrun` needs torch.
"""

from minidist.plan.planner import Plan, plan
from minidist.plan.shapes import PRESETS, Transformer
from minidist.plan.simulator import Simulation, simulate

__all__ = ["PRESETS", "Plan", "Simulation", "Transformer", "plan", "simulate"]
