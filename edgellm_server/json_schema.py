"""The part of JSON Schema that an answer can be held to: checked, and cut down to what counts.

Pure. llama.cpp turns a schema into a grammar on the thread that serves every slot. It ignores what
it does not know, so an answer would break a promise; and it loops for ever on bounds that
contradict each other (`minItems` above `maxItems`), or for seconds on a grammar that can be read
in thousands of ways. So what is not known to work is refused here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

MAX_SCHEMA_BYTES: Final = 16_384
MAX_DEPTH: Final = 16
# Each value costs every token of the answer about 0.03 ms (49k vocabulary, 2 cores, 2025).
MAX_ENUM_VALUES: Final = 256
MAX_PROPERTIES: Final = 256
MAX_DEFINITIONS: Final = 64
# llama.cpp writes a bound out as that many copies of a rule, and gives up at 2000 of one.
MAX_BOUND: Final = 1000
MAX_BOUNDS_IN_ALL: Final = 10_000
# How many readings of the same text the grammar may follow at a time.
MAX_READINGS: Final = 64
# Beyond, JSON readers no longer agree on what a number is.
MAX_INTEGER: Final = 2**53 - 1

_ANNOTATIONS: Final = (
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("$schema", "$id", "$comment", "discriminator"),
)
_DEFINITIONS: Final = ("$defs", "definitions")
_KEYWORDS_OF_TYPE: Final[dict[str, tuple[str, ...]]] = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "minItems", "maxItems"),
    "string": ("minLength", "maxLength", "format"),
    "integer": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "number": (),
    "boolean": (),
    "null": (),
}
# The other formats are annotations, as JSON Schema allows.
_FORMATS: Final = ("date", "time", "date-time", "uuid")
_REF: Final = re.compile(r"#/(\$defs|definitions)/([A-Za-z0-9_.-]+)")
_PLAIN_KEY: Final = re.compile(r"[A-Za-z0-9_$.-]{1,64}")


class SchemaError(Exception):
    """`where` is the path of the keyword at fault, such as `properties.age.minimum`."""

    def __init__(self, where: str, why: str) -> None:
        super().__init__(why)
        self.where = where
        self.why = why


def checked_schema(value: object) -> dict[str, Any]:
    """A JSON Schema without its annotations, fit for the engine. Raises SchemaError."""
    if not isinstance(value, dict):
        raise SchemaError("", "want a JSON Schema object")
    try:
        size_bytes = len(json.dumps(value, ensure_ascii=False).encode())
    except (UnicodeEncodeError, RecursionError):
        raise SchemaError("", "want valid Unicode, nested less deeply") from None
    if size_bytes > MAX_SCHEMA_BYTES:
        raise SchemaError("", f"want at most {MAX_SCHEMA_BYTES} bytes, have {size_bytes}")
    return _Checker(value).checked()


class _Checker:
    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._n_enum_values = 0
        self._n_properties = 0
        self._bounds = 0
        self._refs: list[tuple[str, str]] = []  # where, target

    def checked(self) -> dict[str, Any]:
        definitions: dict[str, dict[str, Any]] = {}  # by "#/$defs/name"
        result = self._schema(self._root, "", 0)
        for keyword in _DEFINITIONS:
            if keyword not in self._root:
                continue
            value = self._root[keyword]
            if not isinstance(value, dict):
                raise SchemaError(keyword, "want an object of schemas")
            if len(value) > MAX_DEFINITIONS:
                raise SchemaError(keyword, f"want at most {MAX_DEFINITIONS}, have {len(value)}")
            result[keyword] = {}
            for name, schema in value.items():
                checked = self._schema(schema, join_path(keyword, name), 1)
                result[keyword][name] = definitions[f"#/{keyword}/{name}"] = checked
        for where, target in self._refs:
            if target not in definitions:
                raise SchemaError(where, "points to no definition of this schema")
        _refuse_endless(definitions)
        _refuse_ambiguous(result, definitions)
        return result

    def _schema(self, value: object, where: str, depth: int) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise SchemaError(where, "want a schema object")
        if depth > MAX_DEPTH:
            raise SchemaError(where, f"want at most {MAX_DEPTH} levels")
        schema = {key: item for key, item in value.items() if key not in _ANNOTATIONS}
        if depth == 0:
            for keyword in _DEFINITIONS:
                schema.pop(keyword, None)
        for keyword, check in (
            ("$ref", self._ref),
            ("anyOf", self._any_of),
            ("oneOf", self._any_of),
            ("const", self._const),
            ("enum", self._enum),
        ):
            if keyword in schema:
                beside = ("type",) if keyword in ("const", "enum") else ()
                _refuse_others(schema, (keyword, *beside), where, f" beside {keyword}")
                return check(schema, keyword, where, depth)
        return self._typed(schema, where, depth)

    def _ref(self, schema: dict[str, Any], keyword: str, where: str, depth: int) -> dict[str, Any]:
        target, where = schema[keyword], join_path(where, keyword)
        if not isinstance(target, str) or not _REF.fullmatch(target):
            raise SchemaError(
                where, "want #/$defs/<name of letters, digits, dot, dash, underscore>"
            )
        self._refs.append((where, target))
        return {"$ref": target}

    def _any_of(
        self, schema: dict[str, Any], keyword: str, where: str, depth: int
    ) -> dict[str, Any]:
        options, where = schema[keyword], join_path(where, keyword)
        if not isinstance(options, list) or not options:
            raise SchemaError(where, "want a list of schemas that is not empty")
        return {
            keyword: [
                self._schema(option, f"{where}[{index}]", depth + 1)
                for index, option in enumerate(options)
            ]
        }

    def _const(
        self, schema: dict[str, Any], keyword: str, where: str, depth: int
    ) -> dict[str, Any]:
        self._values([schema[keyword]], schema.get("type"), join_path(where, keyword))
        return {keyword: schema[keyword]}

    def _enum(self, schema: dict[str, Any], keyword: str, where: str, depth: int) -> dict[str, Any]:
        values, where = schema[keyword], join_path(where, keyword)
        if not isinstance(values, list) or not values:
            raise SchemaError(where, "want a list of values that is not empty")
        self._values(values, schema.get("type"), where)
        return {keyword: values}

    def _values(self, values: list[Any], types: object, where: str) -> None:
        self._n_enum_values += len(values)
        if self._n_enum_values > MAX_ENUM_VALUES:
            raise SchemaError(where, f"want at most {MAX_ENUM_VALUES} values in the whole schema")
        if types is None:
            return
        wanted = types if isinstance(types, list) else [types]
        if not all(any(_is_of_type(value, want) for want in wanted) for value in values):
            raise SchemaError(where, "want values of the type beside them")

    def _typed(self, schema: dict[str, Any], where: str, depth: int) -> dict[str, Any]:
        if "type" not in schema:
            _refuse_others(schema, (), where, " without a type beside it")
            return {}
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        if (
            not types
            or not all(isinstance(name, str) and name in _KEYWORDS_OF_TYPE for name in types)
            or len(set(types)) < len(types)
        ):
            raise SchemaError(
                join_path(where, "type"), f"want one or several of {', '.join(_KEYWORDS_OF_TYPE)}"
            )
        known = ("type", *(keyword for name in types for keyword in _KEYWORDS_OF_TYPE[name]))
        _refuse_others(schema, known, where, f" for type {' or '.join(types)}")
        result: dict[str, Any] = {"type": schema["type"]}
        if "object" in types:
            result |= self._object(schema, where, depth)
        if "array" in types:
            if "items" in schema:
                result["items"] = self._schema(
                    schema["items"], join_path(where, "items"), depth + 1
                )
            if bounds := self._bounded(schema, "minItems", "maxItems", where):
                # llama.cpp reads the bounds only beside items.
                result = {**result, "items": result.get("items", {}), **bounds}
        if "string" in types:
            result |= self._bounded(schema, "minLength", "maxLength", where)
            if schema.get("format") in _FORMATS:
                if len(result) > 1:
                    raise SchemaError(
                        join_path(where, "format"), "not supported beside other keywords"
                    )
                result["format"] = schema["format"]
        if "integer" in types:
            result |= _integer_range(schema, where)
        return result

    def _object(self, schema: dict[str, Any], where: str, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        properties = schema.get("properties", {})
        if not isinstance(properties, dict):
            raise SchemaError(join_path(where, "properties"), "want an object of schemas")
        self._n_properties += len(properties)
        if self._n_properties > MAX_PROPERTIES:
            raise SchemaError(
                join_path(where, "properties"), f"want at most {MAX_PROPERTIES} in the whole schema"
            )
        if "properties" in schema:
            path = join_path(where, "properties")
            if "" in properties:
                # llama.cpp writes it once more among the additional ones.
                raise SchemaError(path, "want names that are not empty")
            result["properties"] = {
                name: self._schema(item, join_path(path, name), depth + 1)
                for name, item in properties.items()
            }
        required = schema.get("required", [])
        if not isinstance(required, list):
            raise SchemaError(join_path(where, "required"), "want a list of names")
        for index, name in enumerate(required):
            if not isinstance(name, str) or name not in properties:
                raise SchemaError(
                    f"{join_path(where, 'required')}[{index}]", "want a name from properties"
                )
        if required:
            result["required"] = list(dict.fromkeys(required))
        more = schema.get("additionalProperties")
        if isinstance(more, bool):
            result["additionalProperties"] = more
        elif "additionalProperties" in schema:
            path = join_path(where, "additionalProperties")
            result["additionalProperties"] = self._schema(more, path, depth + 1)
        return result

    def _bounded(self, schema: dict[str, Any], low: str, high: str, where: str) -> dict[str, Any]:
        bounds: dict[str, Any] = {}
        for keyword in (low, high):
            if keyword in schema:
                bound = _whole(schema[keyword])
                if bound is None or not 0 <= bound <= MAX_BOUND:
                    raise SchemaError(
                        join_path(where, keyword), f"want a whole number from 0 to {MAX_BOUND}"
                    )
                bounds[keyword] = bound
                self._bounds += bound
        if bounds.get(low, 0) > bounds.get(high, MAX_BOUND):
            raise SchemaError(join_path(where, low), f"want at most {high}")
        if self._bounds > MAX_BOUNDS_IN_ALL:
            raise SchemaError(
                where,
                f"want lengths and counts of at most {MAX_BOUNDS_IN_ALL} in the whole schema",
            )
        return bounds


def _integer_range(schema: dict[str, Any], where: str) -> dict[str, Any]:
    bounds: dict[str, int] = {}
    for keyword in _KEYWORDS_OF_TYPE["integer"]:
        if keyword in schema:
            bound = _whole(schema[keyword])
            if bound is None or abs(bound) > MAX_INTEGER:
                raise SchemaError(join_path(where, keyword), "want a whole number below 2^53")
            bounds[keyword] = bound
    low = [bounds["minimum"]] if "minimum" in bounds else []
    low += [bounds["exclusiveMinimum"] + 1] if "exclusiveMinimum" in bounds else []
    high = [bounds["maximum"]] if "maximum" in bounds else []
    high += [bounds["exclusiveMaximum"] - 1] if "exclusiveMaximum" in bounds else []
    if low and high and max(low) > min(high):
        raise SchemaError(where, "want a minimum that is not above the maximum")
    return ({"minimum": max(low)} if low else {}) | ({"maximum": min(high)} if high else {})


# What the grammar made of a schema would do


def _refuse_endless(definitions: Mapping[str, dict[str, Any]]) -> None:
    """A definition that is nothing but itself: $ref to $ref, with nothing to write in between."""
    for start in definitions:
        seen: set[str] = set()
        ahead = [start]
        while ahead:
            for target in _refs_at_once(definitions[ahead.pop()]):
                if target == start:
                    raise SchemaError(start[2:].replace("/", "."), "is defined by itself")
                if target not in seen:
                    seen.add(target)
                    ahead.append(target)


def _refs_at_once(schema: dict[str, Any]) -> Iterator[str]:
    if "$ref" in schema:
        yield schema["$ref"]
    for option in _options(schema):
        yield from _refs_at_once(option)


def _refuse_ambiguous(root: dict[str, Any], definitions: Mapping[str, dict[str, Any]]) -> None:
    """Options that begin alike are all followed until the text tells them apart.

    One inside the other they multiply: two arrays in an anyOf, ten deep, are 1024 readings.
    """
    readings = dict.fromkeys(definitions, 1)
    kinds: dict[str, set[str]] = {}
    unsettled: str | None = None

    def of(schema: dict[str, Any]) -> int:
        if "$ref" in schema:
            return readings[schema["$ref"]]
        if options := _options(schema):
            by_kind: dict[str, int] = {}
            for option in options:
                for kind in _kinds(option, definitions, kinds):
                    by_kind[kind] = by_kind.get(kind, 0) + of(option)
            return max(by_kind.values())
        inner = [*schema.get("properties", {}).values(), schema.get("items")]
        inner.append(schema.get("additionalProperties"))
        return max([1, *(of(part) for part in inner if isinstance(part, dict))])

    # Definitions may contain themselves. A count that a pass for each of them does not settle has
    # a circle in which it grows.
    for _ in range(len(definitions) + 1):
        unsettled = None
        for name, schema in definitions.items():
            if (count := min(of(schema), MAX_READINGS + 1)) != readings[name]:
                readings[name], unsettled = count, name
    for name, count in readings.items():
        if name == unsettled or count > MAX_READINGS:
            raise SchemaError(name[2:].replace("/", "."), _AMBIGUOUS)
    if of(root) > MAX_READINGS:
        raise SchemaError("", _AMBIGUOUS)


_AMBIGUOUS: Final = (
    "the options of anyOf or oneOf begin alike (two objects, two arrays) inside one another; "
    "want fewer of them"
)


def _kinds(
    schema: dict[str, Any],
    definitions: Mapping[str, dict[str, Any]],
    known: dict[str, set[str]],
) -> set[str]:
    """How a value may begin: what tells the options of an anyOf apart at once."""
    if "$ref" in schema:
        target = schema["$ref"]
        if target not in known:
            known[target] = _kinds(definitions[target], definitions, known)
        return known[target]
    if options := _options(schema):
        return set().union(*(_kinds(option, definitions, known) for option in options))
    if "enum" in schema or "const" in schema:
        return {_type_of(value) for value in schema.get("enum", [schema.get("const")])}
    types = schema.get("type", [*_KEYWORDS_OF_TYPE])
    names = types if isinstance(types, list) else [types]
    return {"number" if name == "integer" else name for name in names}


def _options(schema: dict[str, Any]) -> list[dict[str, Any]]:
    options: list[dict[str, Any]] = schema.get("anyOf") or schema.get("oneOf") or []
    return options


# Small things


def _refuse_others(
    schema: dict[str, Any], known: tuple[str, ...], where: str, condition: str
) -> None:
    for keyword in schema:
        if keyword not in known:
            raise SchemaError(join_path(where, keyword), f"not supported{condition}")


def _is_of_type(value: object, name: object) -> bool:
    if name == "integer":
        return _whole(value) is not None
    return _type_of(value) == name


def _type_of(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def _whole(value: object) -> int | None:
    """JSON does not tell 8 from 8.0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    return value


def join_path(where: str, key: str) -> str:
    """('a', 'b') -> 'a.b', ('a', 'b c') -> 'a["b c"]': ASCII, and short whatever a client sends."""
    if not _PLAIN_KEY.fullmatch(key):
        return f"{where}[{json.dumps(key[:64])}]"
    return f"{where}.{key}" if where else key
