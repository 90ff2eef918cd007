"""The list of packages; everything else is in pyproject.toml (whose finder cannot rename a folder)."""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(".", include=["oscar_serving*"]),
        *find_packages("kernels", include=["oscar_kernels*"]),
        "oscar_artifacts",
    ]
)
