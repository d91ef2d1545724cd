"""Forecasts of a training step: pipelines, data parallel, and the choice between them."""

from hvpipe.forecast.choice import candidates, choose
from hvpipe.forecast.data_parallel import forecast_data_parallel
from hvpipe.forecast.pipeline import Forecast, forecast
from hvpipe.forecast.plan_costs import costs_of, dataflow_of
from hvpipe.schedule.plan_schedule import check_is_pipeline, schedule_of

__all__ = [
    "Forecast",
    "candidates",
    "check_is_pipeline",
    "choose",
    "costs_of",
    "dataflow_of",
    "forecast",
    "forecast_data_parallel",
    "schedule_of",
]
