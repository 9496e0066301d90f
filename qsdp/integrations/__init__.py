"""Frameworks that people train with; each module imports its own, and nothing here is imported
by ``import qsdp``.

Hugging Face Accelerate needs none: call :func:`qsdp.apply_qsdp` below ``accelerator.prepare``.
"""
