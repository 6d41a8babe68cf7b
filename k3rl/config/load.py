"""From YAML files and `key=value` overrides to one validated job.

A file may say ``extends: other.yaml`` (or a list), relative to itself: mappings are merged key by key, lists and
scalars replaced, the extending file wins. Overrides come last. Every mistake is one `UserError` that names the
file (or the command line), the key and, for a misspelt one, the nearest right spelling.
"""

from __future__ import annotations

import hashlib
import json
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, TypeAdapter, ValidationError

from k3rl.config.jobs import Job
from k3rl.errors import UserError, nearest

COMMAND_LINE = "the command line"
_job: TypeAdapter[Any] = TypeAdapter(Job)


def load_job(path: str | Path, overrides: Sequence[str] = ()) -> Job:
    """Read, merge, override and validate. Raises `UserError` with one sentence."""
    path = Path(path)
    origin: dict[tuple[str, ...], str] = {}
    tree = _merge_files(path, origin, seen=())
    for text in overrides:
        tree = _override(tree, text, origin)
    try:
        plain = typing.cast(dict[str, Any], OmegaConf.to_container(tree, resolve=True))
    except OmegaConfBaseException as error:
        raise UserError(f"{path}: {str(error).splitlines()[0]}") from error
    plain.setdefault("name", path.stem)
    return validate(plain, origin, default_origin=str(path))


def validate(plain: dict[str, Any], origin: dict[tuple[str, ...], str], default_origin: str) -> Job:
    """Plain mapping to job; validation errors become one `UserError` about the first of them."""
    try:
        return _job.validate_python(plain)
    except ValidationError as error:
        _explain(error, plain, origin, default_origin)


def dump_job(job: Job) -> str:
    """The resolved config as YAML: what is stored with the run, and loads to the same job again."""
    return yaml.safe_dump(job.model_dump(mode="json", by_alias=True), sort_keys=False, allow_unicode=True)


def config_hash(job: Job) -> str:
    """Hash of everything that shapes the results, 16 hex digits."""
    return hash_of(job.model_dump(mode="json", by_alias=True))


def hash_of(plain: Mapping[str, Any]) -> str:
    """The same of a stored config."""
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]


def job_schema() -> dict[str, Any]:
    """JSON schema of every kind of job, with each field's description."""
    return _job.json_schema()


# --- files ---------------------------------------------------------------------------------------------


def _merge_files(path: Path, origin: dict[tuple[str, ...], str], seen: tuple[Path, ...]) -> DictConfig:
    if path.resolve() in seen:
        raise UserError(f"{path}: 'extends' leads back to itself")
    content = _read(path)
    parents = content.pop("extends", None) or []
    parents = [parents] if isinstance(parents, str) else parents
    tree = OmegaConf.create({})
    for parent in parents:
        below = _merge_files(path.parent / parent, origin, (*seen, path.resolve()))
        tree = typing.cast(DictConfig, OmegaConf.merge(tree, below))
    for key in _paths(content):
        origin[key] = str(path)
    return typing.cast(DictConfig, OmegaConf.merge(tree, OmegaConf.create(content)))


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        siblings = sorted(p.name for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        raise UserError(f"no config file {path}{nearest(path.name, siblings)}")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}" if mark else ""
        raise UserError(f"{path}{place}: not valid YAML: {getattr(error, 'problem', error)}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: a config is a mapping of keys to values, this is {type(content).__name__}")
    return content


def _override(tree: DictConfig, text: str, origin: dict[tuple[str, ...], str]) -> DictConfig:
    key, separator, value = text.partition("=")
    if not separator or not key.strip():
        raise UserError(f"{COMMAND_LINE}: '{text}' is not of the form key=value")
    path = tuple(key.strip().split("."))
    try:
        # '@job' is ours; in YAML a plain scalar cannot begin with '@'.
        parsed = value if value.startswith("@") or not value else yaml.safe_load(value)
        changed: Any = parsed
        for part in reversed(path):
            changed = {part: changed}
        merged = OmegaConf.merge(tree, OmegaConf.create(changed))
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"{COMMAND_LINE}: cannot set '{text}': {str(error).splitlines()[0]}") from error
    origin[path] = COMMAND_LINE
    return typing.cast(DictConfig, merged)


def _paths(tree: Any, prefix: tuple[str, ...] = ()) -> Iterable[tuple[str, ...]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield (*prefix, str(key))
            yield from _paths(value, (*prefix, str(key)))


# --- errors --------------------------------------------------------------------------------------------


def _explain(
    error: ValidationError, plain: dict[str, Any], origin: dict[tuple[str, ...], str], default: str
) -> NoReturn:
    # Unknown keys first: they often cause the others (a misspelt required key is also a missing one).
    details = sorted(error.errors(), key=lambda d: d["type"] != "extra_forbidden")
    detail = details[0]
    path, models = _follow(detail["loc"], plain)
    place = ".".join(path)
    source = _origin_of(path, origin, default)
    kind = detail["type"]
    if kind == "extra_forbidden":
        fields = {name for model in models for name in model.model_fields}
        raise UserError(f"{source}: unknown key '{place}'{nearest(path[-1], fields)}") from error
    if kind == "missing":
        raise UserError(f"{source}: the key '{place}' is missing") from error
    if kind == "union_tag_invalid":
        context = detail["ctx"]
        known = [t.strip(" '") for t in context["expected_tags"].split(",")]
        tag = context["discriminator"].strip("'")
        where = f"{place}.{tag}" if place else tag
        raise UserError(
            f"{source}: '{where}' cannot be '{context['tag']}'{nearest(context['tag'], known)}"
        ) from error
    if kind == "union_tag_not_found":
        tag = detail["ctx"]["discriminator"].strip("'")
        raise UserError(f"{source}: the key '{place + '.' if place else ''}{tag}' is missing") from error
    message = detail["msg"].removeprefix("Value error, ")
    message = (
        message[0].lower() + message[1:] if message[:1].isupper() and message[1:2].islower() else message
    )
    value = (
        f" (it is {detail['input']!r})" if not isinstance(detail["input"], dict | list | BaseModel) else ""
    )
    more = f", and {len(details) - 1} more like it" if len(details) > 1 else ""
    raise UserError(f"{source}: '{place or 'the job'}': {message}{value}{more}") from error


def _origin_of(path: tuple[str, ...], origin: dict[tuple[str, ...], str], default: str) -> str:
    """The file that wrote the deepest part of this path."""
    for length in range(len(path), 0, -1):
        if path[:length] in origin:
            return origin[path[:length]]
    return default


def _follow(loc: tuple[int | str, ...], plain: Any) -> tuple[tuple[str, ...], list[type[BaseModel]]]:
    """Drop the union tags that pydantic puts into a location; return the key path and the models at its parent."""
    path: list[str] = []
    models: list[type[BaseModel]] = _models_of(Job)
    parents = models
    node = plain
    for part in loc:
        tagged = [m for m in models if _has_tag(m, part)]
        if isinstance(node, dict) and part not in node and tagged and part != loc[-1]:
            models = tagged
            continue
        parents = models
        path.append(str(part))
        annotations = [m.model_fields[part].annotation for m in models if part in m.model_fields]
        models = [found for a in annotations for found in _models_of(a)] or models
        if isinstance(node, dict):
            node = node.get(part)
        elif isinstance(node, list) and isinstance(part, int) and part < len(node):
            node = node[part]
        else:
            node = None
    return tuple(path), parents


def _has_tag(model: type[BaseModel], tag: int | str) -> bool:
    return any(
        tag in typing.get_args(f.annotation)
        for n, f in model.model_fields.items()
        if n in ("kind", "type", "name")
    )


def _models_of(annotation: Any) -> list[type[BaseModel]]:
    """The models that a field's type can hold, through unions, Annotated, lists and mappings."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if isinstance(annotation, typing.TypeAliasType) if hasattr(typing, "TypeAliasType") else False:
        return _models_of(annotation.__value__)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, list, tuple, dict, typing.Annotated):
        return [m for a in typing.get_args(annotation) for m in _models_of(a)]
    return []
