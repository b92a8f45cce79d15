"""pdbus: prefill/decode disaggregated LLM inference over a ZeroMQ message bus."""

__version__ = "0.1.0"
