"""Traces: where things stand in one, how they are called there, and the way to an OpenTelemetry collector."""
