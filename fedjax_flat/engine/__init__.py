"""Rounds, cohorts, evaluation, checkpoints and the loop around them."""
