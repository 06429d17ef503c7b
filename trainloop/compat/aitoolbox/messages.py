"""AIToolbox's message board: by default a message is kept until the end of its epoch."""

from __future__ import annotations

from enum import Enum
from typing import Any

from trainloop.callbacks.messages import MessageService as CoreMessageService
from trainloop.errors import ConfigurationError

__all__ = ["Message", "MessageHandling", "MessageService"]


class MessageHandling(Enum):
    """Time for which a message is kept."""

    KEEP_FOREVER = "keep_forever"
    UNTIL_END_OF_EPOCH = "until_end_of_epoch"
    UNTIL_READ = "until_read"
    OVERWRITE = "overwrite"


class Message:
    """A value and how long to keep it."""

    def __init__(self, key: str, value: Any, msg_handling_settings: MessageHandling | list[MessageHandling]) -> None:
        self.key = key
        self.value = value
        settings = msg_handling_settings
        self.msg_handling_settings = settings if isinstance(settings, list) else [settings]


class MessageService(CoreMessageService):
    """A board of messages by key."""

    def __init__(self) -> None:
        super().__init__()
        self.message_store: dict[str, list[Message]] = {}

    def read_messages(self, key: str) -> list[Any] | None:  # type: ignore[override]  # None for no messages
        """Return the values of a key, ``None`` if there is no such key."""
        if key not in self.message_store:
            return None
        messages = self.message_store[key]
        self.message_store[key] = [m for m in messages if MessageHandling.UNTIL_READ not in m.msg_handling_settings]
        return [message.value for message in messages]

    def write_message(  # type: ignore[override]  # AIToolbox's keyword name
        self,
        key: str,
        value: Any,
        msg_handling_settings: MessageHandling | list[MessageHandling] = MessageHandling.UNTIL_END_OF_EPOCH,
    ) -> None:
        """Store a value under a key."""
        message = Message(key, value, self.validate_msg_handling_settings(msg_handling_settings))
        if MessageHandling.OVERWRITE in message.msg_handling_settings:
            self.message_store[key] = [message]
        else:
            self.message_store.setdefault(key, []).append(message)

    def end_of_epoch_trigger(self) -> None:
        """Drop messages that are kept for one epoch; the loop calls it."""
        epoch = MessageHandling.UNTIL_END_OF_EPOCH
        kept = {
            key: [message for message in messages if epoch not in message.msg_handling_settings]
            for key, messages in self.message_store.items()
        }
        self.message_store = {key: messages for key, messages in kept.items() if messages}

    @staticmethod
    def validate_msg_handling_settings(
        msg_handling_settings: MessageHandling | list[MessageHandling],
    ) -> list[MessageHandling]:
        """Return the settings as a list.

        Raises
        ------
        TypeError
            If one is not a :class:`MessageHandling`.
        ConfigurationError
            If two of them exclude each other.
        """
        settings = msg_handling_settings if isinstance(msg_handling_settings, list) else [msg_handling_settings]
        for setting in settings:
            if not isinstance(setting, MessageHandling):
                raise TypeError(f"msg_handling_settings={setting!r}: must be a MessageHandling, or a list of them.")
        if len(settings) > 1 and MessageHandling.OVERWRITE not in settings:
            raise ConfigurationError(
                f"msg_handling_settings={settings}: these exclude each other. Only MessageHandling.OVERWRITE can be "
                "combined with another."
            )
        return settings
