"""What proves our claims: the theory behind docs/theory.md. For a checkout; not installed."""
