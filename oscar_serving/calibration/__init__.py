"""Calibration: captured activations → moments → rotations, means and clips → artifact."""

from oscar_serving.calibration.architecture import Architecture
from oscar_serving.calibration.artifact import Artifact, ArtifactError, Clip
from oscar_serving.calibration.find import find_artifact

__all__ = ["Architecture", "Artifact", "ArtifactError", "Clip", "find_artifact"]
