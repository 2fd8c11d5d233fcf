"""Decisions as functions of facts: no clock, no dice, no IO."""
