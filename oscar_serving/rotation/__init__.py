"""Orthogonal maps of the head dimension, row convention ``x' = x @ R``."""

from oscar_serving.rotation.hadamard import bit_reversal, hadamard
from oscar_serving.rotation.householder import householder, random_householder
from oscar_serving.rotation.spectral import check_orthogonal, spectral_rotation
from oscar_serving.rotation.srft import real_dft, roots_of_unity, signs, srft, srht
from oscar_serving.rotation.transform import LayerTransform

__all__ = [
    "LayerTransform",
    "bit_reversal",
    "check_orthogonal",
    "hadamard",
    "householder",
    "random_householder",
    "real_dft",
    "roots_of_unity",
    "signs",
    "spectral_rotation",
    "srft",
    "srht",
]
