"""The planner: what a step costs on a cluster that nobody here has."""
