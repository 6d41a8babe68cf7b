"""The config reference as Markdown, from the pydantic models: every key, its type, default, bounds and meaning.

The documentation's build puts it at reference/config.md (see scripts/mkdocs_hooks.py).
"""

from __future__ import annotations

import enum
import types
import typing
from typing import Any

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from k3rl.config.jobs import Job

HEAD = """# Config reference

Every key of every job. `k3rl config show FILE` prints a file with all defaults filled in, `k3rl config check FILE` says
whether it can run, `k3rl config schema` is this page as JSON schema. A misspelt key is refused with the nearest
right one.
"""


def page() -> str:
    """Jobs first, then what they are made of, in the order in which a reader meets it."""
    models = reachable(models_of(Job))
    return "\n".join([HEAD, *(section(m) for m in models)])


def models_of(annotation: Any) -> list[type[BaseModel]]:
    """The models an annotation can hold, in its order."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return list(dict.fromkeys(m for a in typing.get_args(annotation) for m in models_of(a)))


def reachable(roots: list[type[BaseModel]]) -> list[type[BaseModel]]:
    """The roots, then all that their fields lead to, each once."""
    found = dict.fromkeys(roots)
    queue = list(roots)
    while queue:
        below = [m for f in queue.pop(0).model_fields.values() for m in models_of(f.annotation)]
        queue += [m for m in below if m not in found]
        found |= dict.fromkeys(below)
    return list(found)


def section(model: type[BaseModel]) -> str:
    """Heading, docstring and table of one model."""
    tag = tag_of(model)
    title = f"`{tag}`" if tag else name_of(model)
    lines = [f'## <a id="{anchor(model)}"></a>{title}', "", " ".join((model.__doc__ or "").split()), ""]
    lines += ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    for name, field in model.model_fields.items():
        cells = [f"`{field.alias or name}`", type_of(field), default_of(field), text_of(field)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def tag_of(model: type[BaseModel]) -> str:
    """``kind: rl`` or ``type: native``, where the model is one choice of several."""
    for key in ("kind", "type"):
        field = model.model_fields.get(key)
        if field is not None and isinstance(field.default, str):
            return f"{key}: {field.default}"
    return ""


def name_of(model: type[BaseModel]) -> str:
    return model.__name__.removesuffix("Config")


def anchor(model: type[BaseModel]) -> str:
    return model.__name__.lower()


def type_of(field: FieldInfo) -> str:
    bounds = [b for m in field.metadata if (b := bound(m))]
    return escape(", ".join([annotation(field.annotation), *bounds]))


def annotation(a: Any) -> str:
    """A type in the words of YAML."""
    origin, inner = typing.get_origin(a), typing.get_args(a)
    if a is type(None):
        return "null"
    if a is Any:
        return "anything"
    if origin is typing.Annotated:
        return annotation(inner[0])
    if origin is typing.Literal:
        return " or ".join(f"`{v}`" for v in inner)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(annotation, inner)))
    if origin in (tuple, list, set, frozenset):
        return f"list of {annotation(inner[0])}" if inner else "list"
    if origin is dict:
        return f"mapping of {annotation(inner[0])} to {annotation(inner[1])}"
    if isinstance(a, type) and issubclass(a, BaseModel):
        return f"[{tag_of(a) or name_of(a)}](#{anchor(a)})"
    if isinstance(a, type) and issubclass(a, enum.Enum):
        return " or ".join(f"`{v.value}`" for v in a)
    plain = {str: "text", int: "whole number", float: "number", bool: "true or false"}
    return plain.get(a, getattr(a, "__name__", str(a)))


def bound(constraint: Any) -> str:
    match constraint:
        case annotated_types.Gt(gt=x):
            return f"> {x}"
        case annotated_types.Ge(ge=x):
            return f"≥ {x}"
        case annotated_types.Lt(lt=x):
            return f"< {x}"
        case annotated_types.Le(le=x):
            return f"≤ {x}"
        case annotated_types.MinLen(min_length=x):
            return f"at least {x}"
        case annotated_types.MaxLen(max_length=x):
            return f"at most {x}"
    return ""


def default_of(field: FieldInfo) -> str:
    """As YAML would have it; a nested model's own defaults are in its section."""
    default = field.get_default(call_default_factory=True, validated_data={})
    if default is PydanticUndefined:
        return "**required**"
    if isinstance(default, BaseModel):
        return f"[{tag_of(default.__class__) or name_of(default.__class__)}](#{anchor(default.__class__)})"
    if default is None:
        return "null"
    if isinstance(default, tuple | list | dict | set | frozenset):
        return escape(f"`{list(default) if not isinstance(default, dict) else default}`")
    if isinstance(default, bool):
        return str(default).lower()
    return f"`{default}`" if default != "" else "empty"


def text_of(field: FieldInfo) -> str:
    """Kinds and types say what they are by their value."""
    return escape(" ".join((field.description or "").replace("``", "`").split()))


def escape(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(page())
