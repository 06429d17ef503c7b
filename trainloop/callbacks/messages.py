"""Exchange messages between the callbacks of one loop."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from trainloop.errors import ConfigurationError

__all__ = ["KEEP_FOREVER", "OVERWRITE", "UNTIL_END_OF_EPOCH", "UNTIL_READ", "MessageService"]

KEEP_FOREVER = "keep_forever"
UNTIL_END_OF_EPOCH = "until_end_of_epoch"
UNTIL_READ = "until_read"
OVERWRITE = "overwrite"
_SETTINGS = (KEEP_FOREVER, UNTIL_END_OF_EPOCH, UNTIL_READ, OVERWRITE)


@dataclass
class Message:
    """A value with its key and the settings for its lifetime."""

    key: str
    value: Any
    msg_handling_settings: Collection[str]


class MessageService:
    """A message board with keys, one per loop (in ``ddp`` one per rank).

    Examples
    --------
    >>> board = MessageService()
    >>> board.write_message("best epoch", 3, UNTIL_READ)
    >>> board.read_messages("best epoch"), board.read_messages("best epoch")
    ([3], [])
    """

    def __init__(self) -> None:
        self.message_store: dict[str, list[Message]] = {}

    def write_message(self, key: str, value: Any, settings: str | Sequence[str] = KEEP_FOREVER) -> None:
        """Store ``value`` under ``key``.

        Parameters
        ----------
        key : str
        value : object
        settings : str or sequence of str
            Lifetime: ``'keep_forever'``, ``'until_end_of_epoch'`` or ``'until_read'``; ``'overwrite'`` removes
            older values of the key.
        """
        chosen = frozenset([settings] if isinstance(settings, str) else settings)
        unknown = sorted(chosen - set(_SETTINGS))
        if unknown or not chosen:
            raise ConfigurationError(f"settings={settings!r}: choose from {', '.join(map(repr, _SETTINGS))}.")
        self.store(Message(key, value, chosen))

    def store(self, message: Message) -> None:
        """Append a message to the messages with the same key; with ``'overwrite'``, replace those messages."""
        if OVERWRITE in message.msg_handling_settings:
            self.message_store.pop(message.key, None)
        self.message_store.setdefault(message.key, []).append(message)

    def read_messages(self, key: str) -> list[Any]:
        """Return the values under ``key``, oldest first; an empty list if there are no values."""
        messages = self.message_store.get(key, [])
        self.message_store[key] = [message for message in messages if UNTIL_READ not in message.msg_handling_settings]
        return [message.value for message in messages]

    def end_of_epoch_trigger(self) -> None:
        """Remove messages with the lifetime ``'until_end_of_epoch'``; the loop calls it."""
        messages = [message for of_key in self.message_store.values() for message in of_key]
        self.message_store = {}
        for message in messages:
            if UNTIL_END_OF_EPOCH not in message.msg_handling_settings:
                self.message_store.setdefault(message.key, []).append(message)
