"""Optimisers and learning-rate schedules: one file each."""
