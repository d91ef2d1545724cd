"""Planning: partition a model over a cluster, schedule its micro-batches, forecast the step.

Profiles and clusters come in, plans and forecasts go out. Nothing here needs TensorFlow, MPI or the cluster.

Example:
    ```python
    from hvpipe.plan import Cluster, Pipelining, Profile, forecast, partition

    profile, cluster = Profile.read("profile.json"), Cluster.read("cluster.toml")
    plan = partition(profile, cluster, stages=4, pipelining=Pipelining("1f1b", microbatches=16))
    print(forecast(plan, profile, cluster).step_s)
    ```
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

_NAMES_BY_MODULE = {
    "hvpipe.errors": ("PlanError",),
    "hvpipe.specs.layer_cost": ("LayerCost", "OutputTensor"),
    "hvpipe.specs.profile": ("Profile", "read_pipedream"),
    "hvpipe.specs.cluster": ("Cluster", "Device", "Host", "Link", "Rack", "equal_cluster"),
    "hvpipe.plan.pipelining": ("SCHEDULES", "Pipelining"),
    "hvpipe.plan.placement_cost": ("StageCost",),
    "hvpipe.plan.stage_plan": ("Plan", "Stage"),
    "hvpipe.plan.greedy": ("partition",),
    "hvpipe.plan.exact": ("exact",),
    "hvpipe.plan.baselines": ("BASELINES", "baseline"),
    "hvpipe.plan.explain": ("explain",),
    "hvpipe.schedule.action": ("Action",),
    "hvpipe.schedule.schedule": ("Schedule", "make_schedule"),
    "hvpipe.schedule.plan_schedule": ("schedule_of",),
    "hvpipe.schedule.program": ("Dataflow",),
    "hvpipe.schedule.verify": ("VerifiedSchedule", "verify"),
    "hvpipe.forecast.simulate": ("Simulation", "StageTimes", "simulate"),
    "hvpipe.forecast.lower_bound": ("lower_bound_s",),
    "hvpipe.forecast.pipeline": ("Forecast", "forecast"),
    "hvpipe.forecast.data_parallel": ("forecast_data_parallel",),
    "hvpipe.search.options": ("PipeliningChoice",),
    "hvpipe.search.choice": ("MODES", "Candidate", "candidates", "choose"),
    "hvpipe.trace.events": ("Event", "Trace"),
    "hvpipe.trace.text_chart": ("draw",),
    "hvpipe.trace.chart": ("draw_timeline",),
}
_MODULE_OF = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}

__all__ = list(_MODULE_OF)

if TYPE_CHECKING:
    from hvpipe.errors import PlanError as PlanError
    from hvpipe.forecast.data_parallel import forecast_data_parallel as forecast_data_parallel
    from hvpipe.forecast.lower_bound import lower_bound_s as lower_bound_s
    from hvpipe.forecast.pipeline import Forecast as Forecast
    from hvpipe.forecast.pipeline import forecast as forecast
    from hvpipe.forecast.simulate import Simulation as Simulation
    from hvpipe.forecast.simulate import StageTimes as StageTimes
    from hvpipe.forecast.simulate import simulate as simulate
    from hvpipe.plan.baselines import BASELINES as BASELINES
    from hvpipe.plan.baselines import baseline as baseline
    from hvpipe.plan.exact import exact as exact
    from hvpipe.plan.explain import explain as explain
    from hvpipe.plan.greedy import partition as partition
    from hvpipe.plan.pipelining import SCHEDULES as SCHEDULES
    from hvpipe.plan.pipelining import Pipelining as Pipelining
    from hvpipe.plan.placement_cost import StageCost as StageCost
    from hvpipe.plan.stage_plan import Plan as Plan
    from hvpipe.plan.stage_plan import Stage as Stage
    from hvpipe.schedule.action import Action as Action
    from hvpipe.schedule.plan_schedule import schedule_of as schedule_of
    from hvpipe.schedule.program import Dataflow as Dataflow
    from hvpipe.schedule.schedule import Schedule as Schedule
    from hvpipe.schedule.schedule import make_schedule as make_schedule
    from hvpipe.schedule.verify import VerifiedSchedule as VerifiedSchedule
    from hvpipe.schedule.verify import verify as verify
    from hvpipe.search.choice import MODES as MODES
    from hvpipe.search.choice import Candidate as Candidate
    from hvpipe.search.choice import candidates as candidates
    from hvpipe.search.choice import choose as choose
    from hvpipe.search.options import PipeliningChoice as PipeliningChoice
    from hvpipe.specs.cluster import Cluster as Cluster
    from hvpipe.specs.cluster import Device as Device
    from hvpipe.specs.cluster import Host as Host
    from hvpipe.specs.cluster import Link as Link
    from hvpipe.specs.cluster import Rack as Rack
    from hvpipe.specs.cluster import equal_cluster as equal_cluster
    from hvpipe.specs.layer_cost import LayerCost as LayerCost
    from hvpipe.specs.layer_cost import OutputTensor as OutputTensor
    from hvpipe.specs.profile import Profile as Profile
    from hvpipe.specs.profile import read_pipedream as read_pipedream
    from hvpipe.trace.chart import draw_timeline as draw_timeline
    from hvpipe.trace.events import Event as Event
    from hvpipe.trace.events import Trace as Trace
    from hvpipe.trace.text_chart import draw as draw


def __getattr__(name: str) -> Any:
    # Load on first use: forecasts and schedules import this package, so it can't import them while it loads.
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted(__all__)


class _PlanPackage(ModuleType):
    """Keeps a public function accessible although a submodule has the same name.

    After `import hvpipe.plan.exact`, Python binds that module to the attribute `exact` of this package, and
    would replace the function `exact`.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _MODULE_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _PlanPackage
