"""The planner: what a step costs on a cluster that nobody here has. Imports neither torch nor any
extra, so that `qsdp plan` answers at once."""
