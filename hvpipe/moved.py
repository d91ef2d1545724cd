"""Old module names. Importing one imports the new module, with a DeprecationWarning that names it."""

from __future__ import annotations

import importlib
import importlib.abc
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# Old name -> new name. `hvpipe.comm`, `hvpipe.forecast`, `hvpipe.schedule`, `hvpipe.trace` and
# `hvpipe.keras.data_parallel` are packages now, so their `__init__` answers for the old module.
MOVED = {
    f"hvpipe.{old}": f"hvpipe.{new}"
    for old, new in (
        ("document", "config_file"),
        ("closing", "run_outputs"),
        ("topology", "specs.cluster"),
        ("profile", "specs.profile"),
        ("profile_task", "specs.profile_request"),
        ("fitting", "specs.cluster_fit"),
        ("plan.partition", "plan.greedy"),
        ("plan.filling", "plan.greedy_fill"),
        ("plan.orders", "plan.device_orders"),
        ("plan.placement", "plan.placement_cost"),
        ("plan.shortage", "plan.memory_shortage"),
        ("plan.spans", "plan.span_costs"),
        ("plan.stages", "plan.stage_plan"),
        ("action", "schedule.action"),
        ("generators", "schedule.algorithms"),
        ("dataflow", "schedule.program"),
        ("verify", "schedule.verify"),
        ("simulate", "forecast.simulate"),
        ("data_parallel_forecast", "forecast.data_parallel"),
        ("reduction", "forecast.gradient_reduce"),
        ("choice", "search.choice"),
        ("timeline", "trace.timeline"),
        ("sample", "trace.sample"),
        ("computing", "trace.computing_time"),
        ("report", "trace.run_report"),
        ("drawing", "trace.text_chart"),
        ("chart", "trace.chart"),
        ("engine", "comm.engine"),
        ("device_array", "comm.device_array"),
        ("links", "comm.link_probe"),
        ("memory", "monitor.process_limits"),
        ("placement", "monitor.core_binding"),
        ("machine", "comm.this_host"),
        ("visible_gpus", "monitor.visible_gpus"),
        ("nvml", "monitor.nvml"),
        ("gpu_meter", "monitor.gpu_meter"),
        ("gpu_probes", "monitor.gpu_probes"),
        ("utilization", "monitor.utilization"),
        ("live", "monitor.status_files"),
        ("live_report", "monitor.status_reporter"),
        ("bench_command", "commands.bench"),
        ("doctor", "commands.doctor"),
        ("launch", "commands.launch"),
        ("launch_options", "commands.launch_options"),
        ("supervise", "commands.supervise"),
        ("plan_command", "commands.plan_request"),
        ("plan_report", "commands.plan_report"),
        ("profile_command", "commands.profile"),
        ("top_command", "commands.top"),
        ("keras.data", "keras.data_parallel.shards"),
        ("keras.distributed", "keras.data_parallel.custom_loops"),
        ("keras.overlap", "keras.data_parallel.overlap"),
        ("keras.reducer", "keras.data_parallel.bucket_reduce"),
        ("keras.update", "keras.data_parallel.bucket_update"),
        ("keras.train_steps", "keras.data_parallel.train_steps"),
        ("keras.start", "keras.initial_state"),
        ("keras.pipeline_parallel", "keras.pipeline.model"),
        ("keras.pipeline_checkpoint", "keras.pipeline.checkpoint"),
        ("keras.pipeline_files", "keras.pipeline.saving"),
        ("keras.pipeline_layout", "keras.pipeline.layout"),
        ("keras.pipeline_logs", "keras.pipeline.logs"),
        ("keras.pipeline_machine", "keras.pipeline.rank_driver"),
        ("keras.pipeline_plan", "keras.pipeline.plan_choice"),
        ("keras.pipeline_state", "keras.pipeline.state_names"),
        ("keras.pipeline_step", "keras.pipeline.step"),
        ("keras.pipeline_update", "keras.pipeline.update"),
        ("keras.plain_file", "keras.pipeline.model_file"),
        ("keras.mail", "keras.pipeline.tensor_channel"),
        ("keras.part_loss", "keras.pipeline.microbatch_loss"),
        ("keras.loss_entries", "keras.pipeline.loss_entries"),
        ("keras.targets", "keras.pipeline.batch_targets"),
        ("keras.sharing", "keras.pipeline.shared_variables"),
        ("keras.activity_losses", "keras.graph.activity_losses"),
        ("keras.layer_graph", "keras.graph.layer_graph"),
        ("keras.stage", "keras.graph.stage"),
        ("keras.split_gradient", "keras.graph.split_gradient"),
        ("keras.deferred", "keras.graph.deferred_build"),
        ("keras.measure", "keras.profiling.measure"),
        ("keras.work", "keras.profiling.timed_stage"),
        ("keras.runs", "keras.profiling.timed_spans"),
        ("keras.stopwatch", "keras.profiling.stopwatch"),
        ("keras.footprint", "keras.profiling.footprint"),
        ("keras.estimate", "keras.profiling.estimate"),
        ("keras.cluster", "keras.profiling.cluster"),
        ("keras.profile_ranks", "keras.profiling.ranks"),
        ("keras.update_time", "keras.profiling.update_time"),
        ("keras.target", "keras.profiling.model_loader"),
    )
}


def install() -> None:
    """Let `import` find the old names, after everything else. Another call does nothing."""
    if not any(isinstance(finder, _MovedModuleFinder) for finder in sys.meta_path):
        sys.meta_path.append(_MovedModuleFinder())


def moved_names(package: str, homes: dict[str, str]) -> Callable[[str], Any]:
    """Make a package's `__getattr__` for names of the module that had the package's name before.

    Args:
        package: The name of the package.
        homes: The new module of each name.
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        _warn(f"{package}.{name}", f"from {homes[name]} import {name}", stacklevel=3)
        return getattr(importlib.import_module(homes[name]), name)

    return find


class _MovedModuleFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules by their old names, and makes these names stand for the new modules.

    An import binds the module in its package. If that would hide a function of the same name, such as
    `hvpipe.plan.partition`, the import fails instead, and says what to write.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        old, new = module.__name__, MOVED[module.__name__]
        package, _, name = old.rpartition(".")
        if hasattr(importlib.import_module(package), name):
            raise ImportError(
                f"The module {old} has moved, and {old} is a function now. Write `from {new} import ...`. "
                f"Received: an import of {old}",
                name=old,
            )
        _warn(old, f"from {new} import ...", stacklevel=3)
        # `import` returns what is in sys.modules in the end.
        sys.modules[old] = importlib.import_module(new)


def _warn(old: str, instead: str, stacklevel: int) -> None:
    # The frames of importlib do not count.
    warnings.warn(f"{old} has moved. Write `{instead}`", DeprecationWarning, stacklevel=stacklevel)
