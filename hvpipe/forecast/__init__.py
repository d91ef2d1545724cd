"""Forecasts of a training step: pipelines and data parallel."""

from hvpipe.forecast.data_parallel import forecast_data_parallel
from hvpipe.forecast.pipeline import Forecast, forecast
from hvpipe.forecast.plan_costs import costs_of, dataflow_of
from hvpipe.schedule.plan_schedule import check_is_pipeline, schedule_of

__all__ = [
    "Forecast",
    "check_is_pipeline",
    "costs_of",
    "dataflow_of",
    "forecast",
    "forecast_data_parallel",
    "schedule_of",
]
