"""Frozen records whose fields are consecutive arguments of an operator, and what these may be.

An operator's schema, its implementation and its callers are built from the same records, so that
the order of the arguments is known in one place: the record itself.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from itertools import islice
from typing import Any, NamedTuple, TypeVar

R = TypeVar("R", bound="OperatorRecord")


class Type(NamedTuple):
    """What an argument may be."""

    schema: str
    """Its type as an operator's schema names it."""
    types: tuple[Any, ...]
    """Those that users may give."""
    expected: str
    """As an error names these."""
    contains: Callable[[Any], bool] | None = None
    """Whether a number or a string is a right one; None if all are."""
    values: str = ""
    """As an error names the right ones."""
    check: Callable[..., None] | None = None
    """Raises an error unless a tensor fits the others of the call; None if all do."""

    def of(self, contains: Callable[[Any], bool], values: str) -> "Type":
        """Return the type of some of the numbers or strings."""
        return self._replace(contains=contains, values=values)

    def checked_by(self, check: Callable[..., None]) -> "Type":
        """Return the type of tensors that `check` accepts."""
        return self._replace(check=check)


class Argument(NamedTuple):
    """What is known of an argument beside its name and its default."""

    type: Type
    kind: Any = None
    """The part of the loss that it changes."""
    of: str = "loss"
    """The operator of `torch.ops.cutefce` whose users can give it: that of a loss, of "values" of
    tokens, which has those of losses, too, or "" for none."""


def argument(type: Type, default: Any = dataclasses.MISSING, *more: Any, **named: Any) -> Any:
    """Return a dataclass field that is an operator's argument; `Argument` has the others."""
    metadata = {"argument": Argument(type, *more, **named)}
    return dataclasses.field(default=default, metadata=metadata)


class OperatorRecord:
    """Base of dataclasses whose `argument` fields are passed to an operator one by one."""

    @classmethod
    @cache
    def arguments(cls) -> dict[str, Argument]:
        """Return the arguments by name, in the schema's order."""
        return {field.name: field.metadata["argument"] for field in fields(cls)}

    @classmethod
    def names(cls, of: str | None = None) -> tuple[str, ...]:
        """Return the names of the arguments, or those `of` one operator, in the schema's order."""
        own = cls.arguments().items()
        return tuple(name for name, argument in own if of in (None, argument.of))

    @classmethod
    def schema(cls, of: str | None = None) -> str:
        """Return this record's part of a schema, for example "str reduction='mean'".

        It has all arguments, or those `of` one operator.
        """
        parts = []
        for field in fields(cls):
            own = cls.arguments()[field.name]
            if of in (None, own.of):
                has_default = field.default is not dataclasses.MISSING
                default = f"={field.default!r}" if has_default else ""
                parts.append(f"{own.type.schema} {field.name}{default}")
        return ", ".join(parts)

    def by_name(self) -> dict[str, Any]:
        """Return the arguments by name, in the schema's order."""
        own = vars(self)
        return {name: own[name] for name in self.arguments()}

    def pack(self) -> tuple[Any, ...]:
        """Return the arguments in the schema's order."""
        return (*self.by_name().values(),)

    @cached_property
    def given(self) -> dict[str, Any]:
        """The arguments that are not at their defaults, by name."""
        given, own = {}, vars(self)
        for field in fields(type(self)):
            x, default = own[field.name], field.default
            if x is not default and (default is None or x != default):
                given[field.name] = x
        return given

    @cached_property
    def kinds(self) -> set[Any]:
        """Those of the arguments that are not at their defaults."""
        own = self.arguments()
        return {own[name].kind for name in self.given}

    @classmethod
    def from_keywords(cls: type[R], keywords: Mapping[str, Any]) -> R:
        """Return the record of its arguments in `keywords`; the others have their defaults."""
        return cls(**{name: keywords[name] for name in cls.arguments() if name in keywords})


def fields(cls: type[Any]) -> tuple[dataclasses.Field[Any], ...]:
    """Return the fields of a record."""
    return dataclasses.fields(cls)


def unpack(arguments: Sequence[Any], *kinds: type[Any]) -> list[Any]:
    """Return one record of each kind; the arguments must be theirs, in the order of `kinds`."""
    rest = iter(arguments)
    records = [kind(*islice(rest, len(kind.arguments()))) for kind in kinds]
    if more := [*rest]:
        count = len(arguments) - len(more)
        raise TypeError(f"arguments: got {len(arguments)}, expected {count}, those of {kinds}")
    return records
