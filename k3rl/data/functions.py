"""Find a Python object by the name that a config gives it: ``package.module:name``, ``package.module.name``
or ``path/to/file.py:name``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from k3rl.errors import UserError, nearest


def load_file(path: str | Path) -> ModuleType:
    """Import a plain ``.py`` file as a module of its own, once per content. Its folder is on the path
    meanwhile.

    Raises `UserError` where the file is missing or fails to import.
    """
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise UserError(f"there is no Python file '{path}'")
    digest = hashlib.blake2b(str(file).encode() + b"\0" + file.read_bytes(), digest_size=8).hexdigest()
    name = f"k3rl_file_{file.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UserError(f"'{path}' cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(file.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise UserError(f"'{path}' fails to import: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(file.parent))
    return module


def find_object(name: str) -> Any:
    """The object called ``name`` (see the module's docstring). Raises `UserError` where it is not found."""
    module_name, separator, attribute = name.rpartition(":")
    if not separator:
        module_name, separator, attribute = name.rpartition(".")
    if not module_name or not attribute:
        raise UserError(f"'{name}' is not of the form 'package.module:name' or 'file.py:name'")
    module = load_file(module_name) if module_name.endswith(".py") else _import(module_name, name)
    value: Any = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            public = [n for n in vars(module) if not n.startswith("_")]
            raise UserError(f"'{module_name}' has no '{attribute}'{nearest(part, public)}")
        value = getattr(value, part)
    return value


def _import(module_name: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and module_name.startswith(error.name):
            raise UserError(f"'{name}': there is no module '{error.name}'") from error
        raise UserError(f"'{name}': importing '{module_name}' needs the module '{error.name}'") from error
    except Exception as error:
        raise UserError(f"'{name}' fails to import: {type(error).__name__}: {error}") from error
