"""What an S3 store's answers say: etags, checksums, dates, and that something is not there."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any


class NotThereError(Exception):
    """The object, bucket or upload does not exist."""


def etag_of(answer: Mapping[str, Any]) -> str:
    """Return the etag of an answer or of an entry of a list, without its quotes."""
    return str(answer.get("ETag", "")).strip('"')


def checksum_of(data: bytes | memoryview) -> str:
    """Return the sha256 of bytes in the form of S3's checksum headers."""
    return base64.b64encode(hashlib.sha256(data).digest()).decode()


def hex_of(checksum: str) -> str:
    """Return a checksum of S3 in hex, with the count of parts behind it if it has one; empty for none or nonsense."""
    digest, dash, count = checksum.partition("-")
    try:
        return base64.b64decode(digest, validate=True).hex() + dash + count
    except ValueError:
        return ""


def store_time(answer: Mapping[str, Any]) -> datetime | None:
    """Return when the store gave an answer, by its own clock; None if it does not say."""
    stated = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", "")
    try:
        moment = parsedate_to_datetime(stated)
    except ValueError:
        return None
    return moment if moment.tzinfo else None
