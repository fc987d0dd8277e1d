"""Frozen records whose fields are consecutive arguments of an operator.

An operator's schema, its implementation and its callers are built from the same records, so that
the order of the arguments is known in one place: the record itself.
"""

import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import islice
from typing import Any, NamedTuple, TypeVar, cast

R = TypeVar("R", bound="OperatorRecord")


def argument(kind: str, **options: Any) -> Any:
    """Return a dataclass field that is an operator's argument of the schema type `kind`."""
    return dataclasses.field(metadata={"schema": kind}, **options)


class OperatorRecord:
    """Base of dataclasses whose `argument` fields are passed to an operator one by one."""

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of the arguments, in the schema's order."""
        return _layout(cast(Any, cls)).names

    @classmethod
    def schema(cls) -> str:
        """Return this record's part of a schema, for example "str reduction='mean'"."""
        parts = []
        for field in _arguments(cls):
            has_default = field.default is not dataclasses.MISSING
            default = f"={field.default!r}" if has_default else ""
            parts.append(f"{field.metadata['schema']} {field.name}{default}")
        return ", ".join(parts)

    def pack(self) -> tuple[Any, ...]:
        """Return the arguments in the schema's order."""
        return _layout(cast(Any, type(self))).pack(self)

    @classmethod
    def unpack(cls: type[R], arguments: Iterator[Any]) -> R:
        """Take this record's arguments from the front of `arguments`."""
        return cls(*islice(arguments, len(cls.names())))

    @classmethod
    def from_keywords(cls: type[R], keywords: Mapping[str, Any]) -> R:
        """Return the record of its arguments in `keywords`; the others have their defaults."""
        return cls(**{name: keywords[name] for name in cls.names() if name in keywords})


def unpack(arguments: Iterable[Any], *kinds: type[Any]) -> tuple[Any, ...]:
    """Return one record of each kind; the arguments must be theirs exactly."""
    iterator = iter(arguments)
    records = tuple(kind.unpack(iterator) for kind in kinds)
    if any(True for _ in iterator):
        raise TypeError(f"an operator was given more arguments than those of {kinds}")
    return records


class _Layout(NamedTuple):
    names: tuple[str, ...]
    pack: Callable[[OperatorRecord], tuple[Any, ...]]


@cache
def _layout(cls: type[Any]) -> _Layout:
    names = tuple(field.name for field in _arguments(cls))
    if len(names) == 1:
        return _Layout(names, lambda record: (getattr(record, names[0]),))
    return _Layout(names, operator.attrgetter(*names))


def _arguments(cls: type[Any]) -> tuple[dataclasses.Field[Any], ...]:
    return tuple(field for field in dataclasses.fields(cls) if "schema" in field.metadata)
