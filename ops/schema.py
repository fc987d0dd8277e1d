"""Frozen records whose fields are consecutive arguments of an operator.

An operator's schema, its implementation and its callers are built from the same records, so that
the order of the arguments is known in one place: the record itself.
"""

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar, cast

R = TypeVar("R", bound="OperatorRecord")


def argument(kind: str, *, is_public: bool = True, **options: Any) -> Any:
    """Return a dataclass field that is an operator's argument of the schema type `kind`.

    `is_public` says that users of `torch.ops.cutefce` can give it.
    """
    metadata = {"schema": kind, "is_public": is_public}
    return dataclasses.field(metadata=metadata, **options)


class OperatorRecord:
    """Base of dataclasses whose `argument` fields are passed to an operator one by one."""

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of the arguments, in the schema's order."""
        return _names(cast(Any, cls))

    @classmethod
    def schema(cls, public: bool = False) -> str:
        """Return this record's part of a schema, for example "str reduction='mean'".

        With `public`, without arguments that are not.
        """
        parts = []
        for field in _arguments(cls):
            if public and not field.metadata["is_public"]:
                continue
            has_default = field.default is not dataclasses.MISSING
            default = f"={field.default!r}" if has_default else ""
            parts.append(f"{field.metadata['schema']} {field.name}{default}")
        return ", ".join(parts)

    @classmethod
    def width(cls) -> int:
        """Return the number of arguments."""
        return len(cls.names())

    def pack(self) -> tuple[Any, ...]:
        """Return the arguments in the schema's order."""
        return _getter(cast(Any, type(self)))(self)

    @classmethod
    def from_keywords(cls: type[R], keywords: Mapping[str, Any]) -> R:
        """Return the record of its arguments in `keywords`; the others have their defaults."""
        return cls(**{name: keywords[name] for name in cls.names() if name in keywords})


def unpack(arguments: Sequence[Any], *kinds: type[Any]) -> list[Any]:
    """Return one record of each kind; the arguments must be theirs, in the order of `kinds`."""
    count, spans = _spans(kinds)
    if len(arguments) > count:
        raise TypeError(f"arguments: got {len(arguments)}, expected {count}, those of {kinds}")
    return [make(*arguments[span]) for make, span in spans]


@cache
def _spans(kinds: tuple[type[Any], ...]) -> tuple[int, list[tuple[Callable[..., Any], slice]]]:
    """Return the number of arguments, and which of them make each record."""
    start = 0
    spans: list[tuple[Callable[..., Any], slice]] = []
    for kind in kinds:
        end = start + kind.width()
        spans.append((kind, slice(start, end)))
        start = end
    return start, spans


@cache
def _getter(cls: type[OperatorRecord]) -> Callable[[OperatorRecord], tuple[Any, ...]]:
    return operator.attrgetter(*cls.names())


@cache
def _names(cls: type[Any]) -> tuple[str, ...]:
    return tuple(field.name for field in _arguments(cls))


def _arguments(cls: type[Any]) -> tuple[dataclasses.Field[Any], ...]:
    return tuple(field for field in dataclasses.fields(cls) if "schema" in field.metadata)
