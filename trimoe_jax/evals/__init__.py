"""Measurements of a trained model: held-out loss, recall, synthetic tasks."""
