"""A document as it comes out of a corpus, and how a row with fields becomes one."""

import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from everplex.stages.arrays import Tokens
from everplex.stages.plan_options import PlanOptions
from everplex.storage.errors import UsageError

__all__ = ["Content", "Conversation", "Document", "Place", "Prompted", "Value", "make_document"]

DEFAULT_GROUP = "all"

Value = str | Mapping[str, Any] | Tokens
"""What a reader gives: a text, a row with fields, or token ids."""


class Place(NamedTuple):
    """Where a document stands, for errors."""

    url: str
    unit: str
    """`line`, `row` or `document`."""
    number: int
    """Counted from 1."""

    def __str__(self) -> str:
        return f"{self.url}, {self.unit} {self.number}"


class Prompted(NamedTuple):
    """A completion to score, given its prompt."""

    prompt: str
    completion: str


class Conversation(NamedTuple):
    """Chat messages for the tokenizer's template."""

    messages: list[dict[str, Any]]


Content = str | Prompted | Conversation | Tokens


class Document(NamedTuple):
    """One document, checked."""

    id: str
    group: str
    content: Content
    place: Place

    @property
    def size(self) -> int:
        """Characters, or token ids where there is no text."""
        match self.content:
            case Prompted(prompt, completion):
                return len(prompt) + len(completion)
            case Conversation(messages):
                return sum(len(message.get("content") or "") for message in messages)
            case content:
                return len(content)


def make_document(value: Value, place: Place, file_index: int, options: PlanOptions) -> Document:
    """Return the document that a reader's value is. Raises UsageError naming the place and what was expected."""
    default_id = f"{file_index}:{place.number}"
    if not isinstance(value, Mapping):
        if isinstance(value, str):
            _check_text(value, "text", place)
        return Document(default_id, _group_of_file(place, options), value, place)
    identity = default_id if options.id_field is None else _label(value, options.id_field, place)
    group = DEFAULT_GROUP if options.group_by is None else _label(value, options.group_by, place)
    return Document(identity, group, _content(value, place, options), place)


def _content(row: Mapping[str, Any], place: Place, options: PlanOptions) -> Content:
    match options.content:
        case "messages":
            return Conversation(_messages(row, options.messages_field, place))
        case "completion":
            return Prompted(_text(row, options.prompt_field, place), _text(row, options.completion_field, place))
        case _:
            return _text(row, options.text_field, place)


def _group_of_file(place: Place, options: PlanOptions) -> str:
    folder, name = os.path.split(place.url)
    match options.group_by:
        case None:
            return DEFAULT_GROUP
        case "file":
            return name
        case "folder":
            return os.path.basename(folder)  # noqa: PTH119 - may be a URL
        case field:
            raise UsageError(
                f"{place}: documents of this format have no field {field!r} to group by; "
                "use --group-by file or --group-by folder"
            )


def _field(row: Mapping[str, Any], field: str, place: Place) -> Any:
    """Value of a field; a dotted name goes into nested objects where there is no field of that very name."""
    if field in row:
        return row[field]
    value: Any = row
    for part in field.split("."):
        if not isinstance(value, Mapping) or part not in value:
            names = ", ".join(sorted(map(str, row))) or "none"
            raise UsageError(f"{place}: expected a field {field!r}, found the fields {names}; name another field")
        value = value[part]
    return value


def _text(row: Mapping[str, Any], field: str, place: Place) -> str:
    value = _field(row, field, place)
    if not isinstance(value, str):
        raise UsageError(f"{place}: expected a string in field {field!r}, found {_kind(value)}; mend or drop this row")
    _check_text(value, f"field {field!r}", place)
    return value


def _label(row: Mapping[str, Any], field: str, place: Place) -> str:
    value = _field(row, field, place)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise UsageError(
            f"{place}: expected a string or an integer in field {field!r}, found {_kind(value)}; mend or drop this row"
        )
    _check_text(str(value), f"field {field!r}", place)
    return str(value)


def _messages(row: Mapping[str, Any], field: str, place: Place) -> list[dict[str, Any]]:
    value = _field(row, field, place)
    if not isinstance(value, list) or not value:
        found = "an empty one" if value == [] else _kind(value)
        raise UsageError(
            f"{place}: expected a list of messages in field {field!r}, found {found}; mend or drop this row"
        )
    for index, message in enumerate(value, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UsageError(f"{place}: message {index} of field {field!r} has no role; mend or drop this row")
        _check_text(message["role"], f"role of message {index}", place)
        if isinstance(message.get("content"), str):
            _check_text(message["content"], f"message {index}", place)
        elif message.get("content") is not None or message["role"] != "assistant":
            raise UsageError(
                f"{place}: expected a string as content of message {index}, found {_kind(message.get('content'))}; "
                "mend or drop this row"
            )
        _check_text(json.dumps(message, ensure_ascii=False, default=str), f"message {index}, as JSON,", place)
    return value


def _check_text(text: str, what: str, place: Place) -> None:
    """Refuse what is no text: a NUL (a sign of another encoding or of binary data) and half a surrogate pair."""
    if "\0" in text:
        raise UsageError(f"{place}: {what} has a NUL character at position {text.index(chr(0))}; remove it")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{place}: {what} has a lone surrogate at position {error.start}, which is no text; remove it"
        ) from error


_KINDS: dict[type, str] = {
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}


def _kind(value: object) -> str:
    return _KINDS.get(type(value), type(value).__name__)
