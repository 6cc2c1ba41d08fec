"""Profile, site and release files: read and checked here, frozen dataclasses of the core from here on.

Run as a program (`python -m tasks.specs --write-schemas`) it writes the JSON schemas under manifests/schemas.
"""

from __future__ import annotations

import json
import sys
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from tasks.core.errors import InputError, K2Error
from tasks.core.identity import check_release_id
from tasks.core.spec import Profile, Release, Site
from tasks.site_models import SiteModel
from tasks.spec_models import SPEC_VERSION, ProfileModel, ReleaseModel

Object = dict[str, Any]

_SUFFIXES = (".yaml", ".yml")
_SHOWN_CHARACTERS = 120


def load_site(path: str | Path) -> Site:
    """Return the site of a file; InputError if it cannot be read or a field is wrong."""
    place = Path(path).expanduser()
    return _parse(SiteModel, _read(place, "site"), str(place)).freeze(place.resolve().parent)


def load_profile(name_or_path: str, base: Path | None = None) -> Profile:
    """Return a profile that ships with the tool, by name, or that of a file (relative to `base`)."""
    if "/" in name_or_path or name_or_path.endswith(_SUFFIXES):
        place: Path | Traversable = (base or Path()) / Path(name_or_path).expanduser()
    else:
        folder = resources.files("manifests") / "profiles"
        place = folder / f"{name_or_path}.yaml"
        if not place.is_file():
            known = sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml"))
            raise InputError(
                "K2-INP-001",
                "There is no profile of this name.",
                where="profile",
                got=name_or_path,
                expected=f"one of {', '.join(known)}, or a path to a YAML file",
            )
    return _parse(ProfileModel, _read(place, "profile"), str(place)).freeze()


def load_release(path: str | Path) -> Release:
    """Return the release of a file, its profile loaded and its overrides applied."""
    place = Path(path).expanduser()
    model = _parse(ReleaseModel, _read(place, "release"), str(place))
    try:
        return model.freeze(load_profile(model.profile, place.parent))
    except K2Error as error:
        error.where = error.where if str(place.parent) in error.where else f"{place}: {error.where}"
        raise


def find_release(id_or_path: str, releases_dir: str | Path) -> Release:
    """Return a release by the path of its file, or by its id from a directory; K2-INP-007 if there is none."""
    if "/" in id_or_path or id_or_path.endswith(_SUFFIXES):
        return load_release(id_or_path)
    check_release_id(id_or_path)
    folder = Path(releases_dir)
    place = folder / f"{id_or_path}.yaml"
    if not place.is_file():
        known = sorted(item.stem for item in folder.glob("*.yaml"))
        raise InputError(
            "K2-INP-007",
            "The release is not known.",
            where=str(folder),
            got=id_or_path,
            expected=f"one of {', '.join(known)}" if known else "a file ID.yaml in this directory",
        )
    release = load_release(place)
    if release.id != id_or_path:
        raise InputError(
            "K2-INP-001",
            "The id in the file is not the name of the file.",
            where=f"{place}: id",
            got=release.id,
            expected=id_or_path,
        )
    return release


def load_templates(engine: str) -> dict[str, Object]:
    """Return the object templates of an engine by file name without suffix."""
    folder = resources.files("manifests") / "engines" / engine
    names = sorted(item.name for item in folder.iterdir() if item.name.endswith(".yaml"))
    return {name.removesuffix(".yaml"): _read(folder / name, "template") for name in names}


def load_base() -> tuple[Object, ...]:
    """Return the objects that a site needs once, as written under manifests/base, in the order of file names."""
    folder = resources.files("manifests") / "base"
    names = sorted(item.name for item in folder.iterdir() if item.name.endswith(".yaml"))
    return tuple(doc for name in names for doc in _read_all(folder / name, "base"))


def load_objects(path: str | Path) -> tuple[Object, ...]:
    """Return the Kubernetes objects of any YAML file."""
    return tuple(_read_all(Path(path), "manifest"))


_ModelT = TypeVar("_ModelT", bound=BaseModel)


def _parse(model: type[_ModelT], data: Object, where: str) -> _ModelT:
    version = data.get("version")
    if isinstance(version, int) and not isinstance(version, bool) and version > SPEC_VERSION:
        raise InputError(
            "K2-INP-006",
            "The file was written for a newer version of this tool.",
            where=f"{where}: version",
            got=str(version),
            expected=f"at most {SPEC_VERSION}",
        )
    try:
        return model.model_validate(data)
    except ValidationError as error:
        # Chained to nothing: the library's text repeats what stands here, in its own words.
        raise _input_error(error, model, where) from None


def _input_error(error: ValidationError, model: type[BaseModel], where: str) -> InputError:
    problems = [_problem(item, model) for item in error.errors(include_url=False)]
    field, got, expected = problems[0]
    more = f" ({len(problems)} fields are wrong; this is the first)" if len(problems) > 1 else ""
    return InputError(
        "K2-INP-001",
        f"A field of the file is wrong{more}.",
        where=f"{where}: {field}",
        got=got,
        expected=expected,
        details={"fields": [{"field": f, "got": g, "expected": e} for f, g, e in problems]},
    )


def _problem(item: Any, model: type[BaseModel]) -> tuple[str, str, str]:
    """Return (field, got, expected) of one of pydantic's findings."""
    location = tuple(str(part) for part in item["loc"] if part != "[key]")
    field = ".".join(location) or "the file as a whole"
    if item["type"] == "missing":
        return field, "nothing", "a value: the field is required"
    if item["type"] == "extra_forbidden":
        known = _known_fields(model, location[:-1])
        return field, "an unknown field", f"one of {', '.join(known)}" if known else "no such field"
    message = str(item["msg"]).removeprefix("Value error, ").removeprefix("Input should be ")
    got = json.dumps(item["input"], default=str)
    return field, got if len(got) <= _SHOWN_CHARACTERS else got[:_SHOWN_CHARACTERS] + "...", message


def _known_fields(model: type[BaseModel], location: tuple[str, ...]) -> list[str]:
    for part in location:
        info = model.model_fields.get(part)
        if info is None or not (isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)):
            return []
        model = info.annotation
    return sorted(model.model_fields)


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice: plain YAML silently keeps the last."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[str] = set()
    for key, _ in node.value:
        if key.value in seen:
            raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} stands twice", problem_mark=key.start_mark)
        seen.add(key.value)
    loader.flatten_mapping(node)
    return dict(loader.construct_pairs(node, deep=True))


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def _read(place: Path | Traversable, what: str) -> Object:
    documents = _read_all(place, what)
    if len(documents) != 1:
        raise InputError(
            "K2-INP-001",
            f"The {what} file holds no single document.",
            where=str(place),
            got=f"{len(documents)} documents",
            expected="one",
        )
    return documents[0]


def _read_all(place: Path | Traversable, what: str) -> list[Object]:
    try:
        text = place.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(
            "K2-INP-001",
            f"The {what} file cannot be read: {reason}.",
            where=str(place),
            expected="a readable YAML file",
        ) from error
    try:
        documents = [document for document in yaml.load_all(text, Loader=_Loader) if document is not None]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        raise InputError(
            "K2-INP-001",
            f"The {what} file is not valid YAML.",
            where=f"{place}{line}",
            got=str(getattr(error, "problem", None) or error),
            expected="valid YAML",
        ) from error
    for document in documents:
        if not isinstance(document, dict):
            raise InputError(
                "K2-INP-001",
                f"The {what} file is no mapping.",
                where=str(place),
                got=type(document).__name__,
                expected="fields with values",
            )
    return documents


def schemas() -> dict[str, str]:
    """Return the JSON schema files under manifests/schemas by name."""
    models: dict[str, type[BaseModel]] = {"profile": ProfileModel, "site": SiteModel, "release": ReleaseModel}
    return {
        f"{name}.json": json.dumps(
            {"$schema": "https://json-schema.org/draft/2020-12/schema", **model.model_json_schema()}, indent=2
        )
        + "\n"
        for name, model in models.items()
    }


def main(arguments: list[str]) -> int:
    """Write the schemas; return the exit code."""
    if arguments != ["--write-schemas"]:
        print("usage: python -m tasks.specs --write-schemas", file=sys.stderr)
        return 2
    folder = Path(str(resources.files("manifests") / "schemas"))
    folder.mkdir(exist_ok=True)
    for name, text in schemas().items():
        (folder / name).write_text(text, encoding="utf-8")
        print(folder / name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
