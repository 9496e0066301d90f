"""Frameworks that people train with; each module imports its own, and nothing here is imported
by ``import qsdp``.
"""
