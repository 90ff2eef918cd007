"""Tests, as a package: folders here are called like installed packages and must not shadow them."""
