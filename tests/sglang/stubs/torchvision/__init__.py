"""Stands in for torchvision, which SGLang imports for image models: every submodule and name exists, none works."""

import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "0.0.0"


class _Missing(type):
    def __getattr__(cls, name):  # type: ignore[no-untyped-def]
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(name, (), {})


class _Module(types.ModuleType):
    def __getattr__(self, name):  # type: ignore[no-untyped-def]
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name.startswith(__name__ + "."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):  # type: ignore[no-untyped-def]
        return _Module(spec.name)

    def exec_module(self, module):  # type: ignore[no-untyped-def]
        module.__path__ = []


sys.meta_path.append(_Finder())
