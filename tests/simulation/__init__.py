"""Deterministic simulations: many workers as steps of one scheduler, with a clock that only they move."""
