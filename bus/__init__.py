"""What is said between nodes, tools and clients, and how it travels. `Client` is the SDK."""

if __name__ == "bus":
    raise ImportError("import pdbus.bus: a bare 'bus' would be a second copy of every class")

from .client import Client
from .errors import (
    Broken,
    Closed,
    ConfigError,
    DeadlineExceeded,
    LocalProtocolError,
    Overloaded,
    PdError,
    RemoteProtocolError,
    RequestError,
)
from .generation import Conversation, Generation
from .messages import Finished, Published, Sampling, Token
from .subscription import Subscription
from .sync import SyncClient, SyncGeneration, SyncSubscription

__all__ = [
    "Broken",
    "Client",
    "Closed",
    "ConfigError",
    "Conversation",
    "DeadlineExceeded",
    "Finished",
    "Generation",
    "LocalProtocolError",
    "Overloaded",
    "PdError",
    "Published",
    "RemoteProtocolError",
    "RequestError",
    "Sampling",
    "Subscription",
    "SyncClient",
    "SyncGeneration",
    "SyncSubscription",
    "Token",
]
