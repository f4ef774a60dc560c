#!/usr/bin/env python3
"""Schemas as real programs write them, with instances that jsonschema judged: tests/data/schemas/programs.jsonl.

    python3 tests/constrain/make_program_schemas.py >tests/data/schemas/programs.jsonl

Pydantic models, bodies of OpenAPI operations and tool definitions, drawn from a fixed seed. Needs pydantic and jsonschema.
"""
import copy
import enum
import json
import random
import string
from typing import Annotated, Literal, Optional, Union

import jsonschema
from pydantic import BaseModel, ConfigDict, Field, create_model

rng = random.Random(20)
NAMES = ["id", "name", "email", "age", "tags", "address", "city", "zip_code", "price", "quantity", "status", "created", "items",
         "notes", "is_active", "score", "user", "title", "parent", "kind", "unit", "location", "query", "limit", "größe", "a\"b"]
WORDS = ["alpha", "beta", "gamma", "open", "closed", "in progress", "celsius", "fahrenheit", "né", "line\nbreak", "\"quoted\"", "a/b"]


def model(depth, index):
    fields = {}
    for name in rng.sample(NAMES, rng.randint(1, 6)):
        python_name = "".join(c for c in name if c.isascii() and c.isalpha()) or "field"
        if python_name in fields:
            continue
        kind = field_type(depth)
        options = {}
        if rng.random() < 0.3:
            options["description"] = "What it is."
        if python_name != name:
            options["alias"] = name
        if rng.random() < 0.3:
            fields[python_name] = (Optional[kind], Field(default=None, **options))
        else:
            fields[python_name] = (kind, Field(**options))
    config = ConfigDict(extra="forbid") if rng.random() < 0.7 else None
    return create_model(f"Model{index}x{depth}x{rng.randint(0, 10**6)}", __config__=config, **fields)


def field_type(depth):
    choices = [str, int, float, bool,
               Annotated[str, Field(min_length=rng.randint(0, 2), max_length=rng.randint(2, 8))],
               Annotated[str, Field(pattern=rng.choice([r"^[A-Z]{2,3}-\d{4}$", r"^\w+$", r"^[a-z]+(-[a-z]+)*$", r"^#[0-9a-fA-F]{6}$"]))],
               Annotated[int, Field(ge=rng.randint(-20, 0), le=rng.randint(1, 150))],
               Annotated[float, Field(gt=0, le=rng.choice([1, 10.5, 99.99]))],
               Literal[tuple(rng.sample(WORDS, rng.randint(1, 4)))],
               enum.Enum("E%d" % rng.randint(0, 10**6), {f"v{i}": w for i, w in enumerate(rng.sample(WORDS, 3))}),
               list[str], list[int], dict[str, int], Union[int, str]]
    if depth < 3:
        inner = model(depth + 1, rng.randint(0, 99))
        choices += [inner, list[inner], Optional[inner], Annotated[list[inner], Field(min_length=1, max_length=3)]]
    return rng.choice(choices)


class Node(BaseModel):
    value: int
    children: list["Node"] = []


class Link(BaseModel):
    model_config = ConfigDict(extra="forbid")
    label: str
    next: Optional["Link"] = None


def simple_schema(depth):
    """As OpenAPI documents and tool definitions are written, by hand."""
    kind = rng.choice(["string", "enum", "integer", "number", "boolean", "date", "array", "object", "nullable", "union", "uuid"])
    if depth > 2 and kind in ("array", "object", "union"):
        kind = "string"
    if kind == "enum":
        return {"type": "string", "enum": rng.sample(WORDS, rng.randint(1, 5))}
    if kind == "integer":
        return rng.choice([{"type": "integer"}, {"type": "integer", "format": "int32"}, {"type": "integer", "minimum": 0, "maximum": 100},
                           {"type": "integer", "minimum": 1, "default": 10}])
    if kind == "number":
        return rng.choice([{"type": "number"}, {"type": "number", "minimum": -90, "maximum": 90}, {"type": "number", "exclusiveMinimum": 0}])
    if kind == "boolean":
        return {"type": "boolean"}
    if kind == "date":
        return {"type": "string", "format": "date"}
    if kind == "uuid":
        return {"type": "string", "format": "uuid"}
    if kind == "array":
        schema = {"type": "array", "items": simple_schema(depth + 1)}
        if rng.random() < 0.4:
            schema["maxItems"] = rng.randint(1, 4)
        return schema
    if kind == "object":
        return object_schema(depth + 1)
    if kind == "nullable":
        return {"type": ["string", "null"], "description": "Or nothing."}
    if kind == "union":
        return {"anyOf": [simple_schema(depth + 1), {"type": "null"}]}
    return {"type": "string", "description": "A text."}


def object_schema(depth, strict=None):
    names = rng.sample(NAMES, rng.randint(1, 5))
    strict = rng.random() < 0.5 if strict is None else strict
    schema = {"type": "object", "properties": {name: simple_schema(depth) for name in names}}
    schema["required"] = names if strict else rng.sample(names, rng.randint(0, len(names)))
    if strict or rng.random() < 0.3:
        schema["additionalProperties"] = False
    return schema


def body_schema():
    """An OpenAPI operation's body: components, variants told apart by a constant."""
    cat, dog = object_schema(1, True), object_schema(1, True)
    for name, variant in (("cat", cat), ("dog", dog)):
        variant["properties"]["petType"] = {"const": name}
        variant["required"] = variant["required"] + ["petType"]
    body = object_schema(1)
    body["properties"]["pet"] = {"oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}], "discriminator": {"propertyName": "petType"}}
    body["$defs"] = {"Cat": cat, "Dog": dog}
    body["title"] = "Body"
    return body


def instance(schema, root, depth=0):
    if schema is True or schema == {}:
        return rng.choice([1, "x", None, [], {}])
    if "$ref" in schema:
        return instance(root["$defs"][schema["$ref"].rsplit("/", 1)[1]], root, depth + 1)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            options = schema[key] if depth < 8 else [o for o in schema[key] if o.get("type") == "null"] or schema[key]
            return instance(rng.choice(options), root, depth + 1)
    if "allOf" in schema:
        return instance(schema["allOf"][0], root, depth + 1)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return rng.choice(schema["enum"])
    kind = schema.get("type")
    kind = rng.choice(kind) if isinstance(kind, list) else kind
    if kind == "object":
        out = {}
        for name, inner in schema.get("properties", {}).items():
            if name in schema.get("required", []) or (rng.random() < 0.5 and depth < 8):
                out[name] = instance(inner, root, depth + 1)
        more = schema.get("additionalProperties", True)
        if more and rng.random() < 0.4:
            out["extra" + rng.choice(string.ascii_lowercase)] = instance(more, root, depth + 1)
        return out
    if kind == "array":
        count = rng.randint(schema.get("minItems", 0), min(schema.get("maxItems", 3), 3)) if depth < 8 else schema.get("minItems", 0)
        return [instance(schema.get("items", True), root, depth + 1) for _ in range(count)]
    if kind == "integer":
        return rng.randint(schema.get("minimum", -5), schema.get("maximum", 1000))
    if kind == "number":
        low, high = schema.get("minimum", schema.get("exclusiveMinimum", -3)), schema.get("maximum", 5)
        return rng.choice([round(rng.uniform(low, high), rng.randint(1, 3)), rng.randint(int(low) + 1, max(int(high), int(low) + 1))])
    if kind == "boolean":
        return rng.random() < 0.5
    if kind == "null":
        return None
    if "pattern" in schema:
        return rng.choice(["AB-1234", "word", "a-bc", "#00ffAA", "ABCD-1", "no match!"])
    if schema.get("format") == "date":
        return rng.choice(["2024-02-29", "1999-12-31"])
    if schema.get("format") == "uuid":
        return "123e4567-e89b-12d3-a456-426614174000"
    return rng.choice(["", "ab", "né", "tab\there", "\"", "\\", "😀", "longer text with spaces"])


def mutate(value):
    """A copy with one thing changed somewhere."""
    value = copy.deepcopy(value)
    places = []

    def walk(parent, key, node):
        places.append((parent, key, node))
        for k, v in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else []:
            walk(node, k, v)

    walk(None, None, value)
    parent, key, node = rng.choice(places)
    action = rng.random()
    if isinstance(node, dict) and action < 0.3:
        node["unexpected"] = 1
        return value
    if isinstance(parent, dict) and action < 0.6:
        del parent[key]
        return value
    new = rng.choice([None, True, -1, 10**6, 2.5, "", "unknown value", [], {}, [1], {"x": 1}])
    if parent is None:
        return new
    parent[key] = new
    return value


def whole_float(value):
    if isinstance(value, (list, dict)):
        return any(map(whole_float, value.values() if isinstance(value, dict) else value))
    return isinstance(value, float) and value == int(value)


def main():
    schemas = [Node.model_json_schema(), Link.model_json_schema()]
    while len(schemas) < 200:
        schemas.append(model(0, len(schemas)).model_json_schema())
    while len(schemas) < 350:
        schemas.append(body_schema())
    while len(schemas) < 500:
        schemas.append({"$schema": "https://json-schema.org/draft/2020-12/schema", **object_schema(0)})
    for schema in schemas:
        # Formats are enforced, so that they are here too.
        validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
        valid, invalid = [], []
        for _ in range(12):
            value = instance(schema, schema)
            for candidate in (value, mutate(value)):
                if whole_float(candidate) or len(json.dumps(candidate)) > 600:
                    continue
                into = valid if validator.is_valid(candidate) else invalid
                if candidate not in into and len(into) < 4:
                    into.append(candidate)
        print(json.dumps({"schema": schema, "valid": valid, "invalid": invalid}, ensure_ascii=False, separators=(",", ":")))


main()
