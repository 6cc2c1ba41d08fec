"""A small Hugging Face Hub for the rehearsal: repositories on disk and the server that huggingface_hub reads from."""

from infra.rehearsal.hub.repository import publish

__all__ = ["publish"]
