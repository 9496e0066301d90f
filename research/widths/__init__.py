"""Blocks of different widths under one budget, and JointSQ's classes: what they are worth.

``python -m research.widths.train`` and ``python -m research.widths.errors`` write the tables beside
this file, which docs/systems/jointsq.md shows. Simulated in one process; not in the wheel.
"""
