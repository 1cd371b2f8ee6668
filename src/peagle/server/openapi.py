"""The OpenAPI document: bodies are read by our own code, so their schemas are added here."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

REFERENCE = "#/components/schemas/{model}"


def add_bodies(app: FastAPI, bodies: Mapping[str, type[BaseModel]]) -> None:
    """Describe what each path takes; `/invocations` takes any of it that is a question."""
    described: dict[str, Any] = {}
    make = app.openapi

    def document() -> dict[str, Any]:
        if not described:
            described.update(_with_bodies(make(), bodies))
        return described

    app.openapi = document  # type: ignore[method-assign]


def _with_bodies(document: dict[str, Any], bodies: Mapping[str, type[BaseModel]]) -> dict[str, Any]:
    kinds = list(dict.fromkeys(bodies.values()))
    _, schemas = models_json_schema([(kind, "validation") for kind in kinds], ref_template=REFERENCE)
    document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
    for path, kind in bodies.items():
        _set_body(document, path, {"$ref": REFERENCE.format(model=kind.__name__)})
    asked = [{"$ref": REFERENCE.format(model=kind.__name__)} for kind in kinds[:2]]
    _set_body(document, "/invocations", {"anyOf": asked})
    return document


def _set_body(document: dict[str, Any], path: str, schema: dict[str, Any]) -> None:
    operation = document["paths"][path]["post"]
    operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
