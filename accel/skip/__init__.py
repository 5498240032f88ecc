"""Skipping deep blocks on most steps: the schedule, the forecast and the state of a run. Pure torch."""
