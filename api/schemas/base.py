"""Makes answers of the fabric's records.

- A record is shown as it is where the api has nothing to add: its fields, and the lines under them, are the promise.
- Where the api knows more of it, a dataclass extends the record by that (`Shown`); `shown` makes one.
- A model is the api's own: envelopes, sums and derived figures, and selections of what may be seen.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, TypeAdapter, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from ...fabric.contract.text import did_you_mean

FIELDS_NAMED_MAX = 20

V = TypeVar("V", bound="Model | Shown")


class Model(BaseModel):
    """Base of the api's own answers; the line under a field is its description, also in the records that it holds."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class Request(BaseModel):
    """Base of what callers send: a field that is not known is refused, and so is one of another type ("3", true)."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _name_what_is_unknown(cls, sent: Any) -> Any:
        """Say of fields that are not known which are, and where a run's settings go."""
        unknown = sorted(sent.keys() - cls.model_fields.keys(), key=str) if isinstance(sent, dict) else []
        if not unknown:
            return sent
        words = [
            f"there is no field {str(name)[:100]!r}; {did_you_mean(str(name), cls.model_fields)}"
            for name in unknown[:FIELDS_NAMED_MAX]
        ]
        if len(unknown) > FIELDS_NAMED_MAX:
            words.append(f"and so for {len(unknown) - FIELDS_NAMED_MAX:,} more")
        if "settings" in cls.model_fields:
            words.append('settings of the run go into "settings"')
        raise PydanticCustomError("unknown_field", "{words}", {"words": "; ".join(words)})


def all_requests() -> list[type[Request]]:
    """Return the models of what callers send, whose fields may be left out."""
    direct = Request.__subclasses__()
    return [*direct, *(each for parent in direct for each in parent.__subclasses__())]


class Shown:
    """Base of a dataclass that extends a record: the lines under the record's fields describe them here, too.

    A field that the record has as well, with a default or as a property, is declared with `= field()`: without it, the
    record's would be its default.
    """

    __slots__ = ()

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Add what pydantic, which reads the class itself alone, has no description of."""
        found = handler(schema)
        properties = handler.resolve_ref_schema(found)["properties"]
        for name, text in _descriptions(cls.__mro__[2]).items():
            properties[name].setdefault("description", text)
        return found


def shown(cls: type[V], *records: Any, **more: Any) -> V:
    """Make an answer of what records have under the names of its fields, and of what is said besides.

    Args:
        cls: a model, or a dataclass that extends a record.
        records: a later one's value counts where several have a name.
        more: further fields; counts before the records.
    """
    values = {name: getattr(record, name) for record in records for name in _shared_names(cls, type(record))}  # type: ignore[arg-type]
    return cls(**{**values, **more})


@cache
def _shared_names(cls: Any, record: type[Any]) -> tuple[str, ...]:
    """Return the fields of an answer that a record has, as fields or as properties."""
    names = cls.model_fields if issubclass(cls, Model) else [each.name for each in fields(cls)]
    own = {each.name for each in fields(record)} if is_dataclass(record) else set(getattr(record, "model_fields", ()))
    return tuple(name for name in names if name in own or hasattr(record, name))


def _descriptions(record: type[Any]) -> dict[str, str]:
    """Collect the lines under a record's fields, and those of what it extends itself."""
    found: dict[str, str] = {}
    for base in reversed(record.__mro__):
        if is_dataclass(base):
            schema = TypeAdapter(list[base], config=Model.model_config).json_schema()  # type: ignore[valid-type]
            rows = schema["$defs"][base.__name__]["properties"]
            found |= {name: row["description"] for name, row in rows.items() if "description" in row}
    return found
