"""Artifacts that ``oscar calibrate`` wrote, one folder a model; installed as package ``oscar_artifacts``."""
