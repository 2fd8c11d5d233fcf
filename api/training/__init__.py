"""Trainers in any language: tasks in, groups out, weights in, over HTTP."""
