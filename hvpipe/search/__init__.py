"""The search for the fastest plan, judged by the forecast of its step."""
