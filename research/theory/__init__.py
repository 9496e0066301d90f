"""The convergence guarantees of docs/theory.md, checked on the library's own quantizers.

``problems`` states functions with the constants that theorems ask for, ``lattice`` rounds as the
paper does, ``descent`` runs the algorithms, ``formulas`` holds what is derived; ``guarantee``,
``floors``, ``differences`` and ``exhaustive`` compare the two and return claims, which ``qsdp check
--theory`` prints.
"""
