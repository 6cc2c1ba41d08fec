"""The object store over S3, by boto3's client; resources and the transfer manager are not used.

boto3 is imported with the first client, so that programs which need none start at once. Blobs are read past it, by a
request that it signs: see ADR 0019 for what that saves.

Every write carries a sha256 that the store checks and that is part of the signed headers, so the body is not hashed a
second time for the signature.
"""

from __future__ import annotations

import json
import os
import re
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tasks.adapters.byte_stream import Answer, Patience, answered, trusting
from tasks.adapters.store_answers import NotThereError, checksum_of, etag_of, hex_of
from tasks.adapters.store_uploads import StoreUploads
from tasks.core.errors import After, ConflictError, InputError, K2Error, Never, UnavailableError
from tasks.ports import StoredObject, UploadGoneError

BLOCK_BYTES = 1024 * 1024
_SIGNATURE_S = 900
_MISSING = frozenset({"404", "NoSuchKey", "NotFound"})
_CONDITION = frozenset({"412", "PreconditionFailed", "409", "ConditionalRequestConflict"})
_FINAL = frozenset({"401", "403", "AccessDenied", "SignatureDoesNotMatch", "InvalidAccessKeyId", "NoSuchBucket"})


@dataclass(frozen=True)
class StoreCredentials:
    """Access to the store; never shown by repr."""

    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)

    @classmethod
    def from_file(cls, path: Path) -> StoreCredentials:
        """Read a JSON file {access_key, secret_key}; InputError if it is not one. Its content is never shown."""
        try:
            data = json.loads(path.read_bytes())
            return cls(str(data["access_key"]), str(data["secret_key"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                "K2-INP-001",
                "The store's credentials cannot be read.",
                where=str(path),
                got=type(error).__name__,
                expected='a JSON file {"access_key": ..., "secret_key": ...}',
            ) from None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> StoreCredentials:
        """Read K2_STORE_ACCESS_KEY and K2_STORE_SECRET_KEY; InputError if one is missing."""
        try:
            return cls(environment["K2_STORE_ACCESS_KEY"], environment["K2_STORE_SECRET_KEY"])
        except KeyError as error:
            raise InputError("K2-INP-001", f"{error.args[0]} is not set.", where="environment") from None


class S3Store(StoreUploads):
    """Implements `ports.Store` on one bucket of an S3-compatible store. Threads may share it.

    Args:
        endpoint: URL of the store.
        bucket: its bucket; `ensure_bucket` makes it.
        credentials: access and secret key.
        region: as the signature needs it; most stores take any.
        stall_s: no byte for so long is an UnavailableError.
        tries: how often a request is sent in all before its failure counts; `open` sends it once.
        least_bytes_per_s: a stream that brings less in `stall_s` of waiting is an UnavailableError too.
    """

    def __init__(
        self,
        endpoint: str,
        bucket: str,
        credentials: StoreCredentials,
        *,
        region: str = "us-east-1",
        stall_s: float = 30.0,
        tries: int = 3,
        least_bytes_per_s: float = Patience.least_bytes_per_s,
    ) -> None:
        self._endpoint = endpoint
        self._bucket = bucket
        self._credentials = credentials
        self._region = region
        self._stall_s = stall_s
        self._patience = Patience(stall_s=stall_s, least_bytes_per_s=least_bytes_per_s)
        self._tries = tries

    def __repr__(self) -> str:
        return f"S3Store({self._endpoint!r}, {self._bucket!r})"

    @cached_property
    def _client(self) -> Any:
        from boto3.session import Session
        from botocore.config import Config

        return Session().client(
            "s3",
            region_name=self._region,
            endpoint_url=self._endpoint,
            aws_access_key_id=self._credentials.access_key,
            aws_secret_access_key=self._credentials.secret_key,
            config=Config(
                signature_version="s3v4",
                s3={"addressing_style": "path", "payload_signing_enabled": False},
                retries={"mode": "standard", "total_max_attempts": self._tries},
                connect_timeout=self._patience.connect_s,
                read_timeout=self._stall_s,
                max_pool_connections=32,
                request_checksum_calculation="when_required",
                # Whoever reads blobs hashes them; whoever reads documents knows their digest.
                response_checksum_validation="when_required",
            ),
        )

    def ensure_bucket(self) -> None:
        """Make the bucket unless it is there; the same twice is no error."""
        try:
            self._call("head_bucket", "")
        except NotThereError:
            try:
                self._call("create_bucket", "")
            except K2Error as error:
                if "BucketAlready" not in error.summary:
                    raise

    def head(self, key: str) -> StoredObject | None:
        """Return an object's identity, or None if there is none."""
        try:
            found = self._call("head_object", key, Key=key, ChecksumMode="ENABLED")
        except NotThereError:
            return None
        size_bytes, sha256 = int(found["ContentLength"]), hex_of(found.get("ChecksumSHA256", ""))
        return StoredObject(key, size_bytes, etag_of(found), sha256)

    def get(self, key: str) -> tuple[bytes, str]:
        """Return a small object's bytes and etag; KeyError if there is none."""
        try:
            found = self._call("get_object", key, Key=key)
        except NotThereError as error:
            raise KeyError(key) from error
        return b"".join(self._body(key, found["Body"])), etag_of(found)

    def put(self, key: str, data: bytes, *, if_absent: bool = False, if_match: str = "") -> str:
        """Write a small object and return its etag; ConflictError (K2-CON-004) when the condition does not hold.

        When the answer to a conditional write was lost and the repeated one finds the condition broken, the object is
        read: if it holds these very bytes, it was the first one that wrote them.
        """
        condition: dict[str, str] = (
            {"IfNoneMatch": "*"} if if_absent else {"IfMatch": f'"{if_match}"'} if if_match else {}
        )
        try:
            return etag_of(
                self._call("put_object", key, Key=key, Body=data, ChecksumSHA256=checksum_of(data), **condition)
            )
        except NotThereError as error:
            # If-Match on what is not there.
            raise _condition_failed(self._where(key), "no such object", if_match) from error
        except ConflictError as error:
            if error.details.get("repeated"):
                there, etag = self.get(key)
                if there == data:
                    return etag
            raise

    def list_objects(self, prefix: str) -> list[StoredObject]:
        """Return all objects under a prefix in key order."""
        found: list[StoredObject] = []
        arguments: dict[str, Any] = {"Prefix": prefix}
        while True:
            page = self._call("list_objects_v2", prefix, **arguments)
            found += [StoredObject(item["Key"], int(item["Size"]), etag_of(item)) for item in page.get("Contents", ())]
            if not page.get("IsTruncated"):
                return sorted(found, key=lambda item: item.key)
            arguments["ContinuationToken"] = page["NextContinuationToken"]

    def open(self, key: str, offset: int = 0) -> Iterator[memoryview]:
        """Yield an object's bytes from an offset on, in blocks; UnavailableError when the stream breaks.

        Each block is a view of one buffer: it holds until the next one is asked for. The request goes straight to the
        endpoint, past any proxy, and is made once.
        """
        with answered(
            self._signed(key),
            {"Range": f"bytes={offset}-"} if offset else {},
            whose="The store",
            where=self._where(key),
            patience=self._patience,
            tls=self._tls,
        ) as answer:
            if answer.status not in (200, 206):
                raise self._refused(answer, key)
            if not answer.header("ETag"):
                raise answer.error("answer is no object: it has no ETag", got=answer.header("Content-Type"))
            yield from answer.blocks(offset)

    def delete(self, key: str) -> None:
        """Delete an object; deleting what is not there is no error."""
        try:
            self._call("delete_object", key, Key=key)
        except NotThereError:
            return

    def _body(self, key: str, body: Any) -> Iterator[bytes]:
        from botocore.exceptions import BotoCoreError

        try:
            yield from body.iter_chunks(BLOCK_BYTES)
        except (BotoCoreError, OSError) as error:
            raise UnavailableError(
                "K2-UNA-001",
                f"The store's stream broke: {type(error).__name__}.",
                where=self._where(key),
                retry=After(1.0),
            ) from error
        finally:
            body.close()

    def _signed(self, key: str) -> str:
        """Return the address of an object with a signature in its query: not for messages."""
        from botocore.exceptions import BotoCoreError

        arguments = {"Bucket": self._bucket, "Key": key}
        try:
            return str(self._client.generate_presigned_url("get_object", Params=arguments, ExpiresIn=_SIGNATURE_S))
        except (BotoCoreError, ValueError) as error:
            raise UnavailableError(
                "K2-UNA-001", f"No request for the store can be made: {error}", where=self._where(key)
            ) from error

    @cached_property
    def _tls(self) -> ssl.SSLContext | None:
        """Trust whom the client trusts for everything else."""
        from botocore.httpsession import get_cert_path

        if not self._endpoint.startswith("https:"):
            return None
        named = os.environ.get("AWS_CA_BUNDLE") or os.environ.get("REQUESTS_CA_BUNDLE")
        return trusting(named or str(get_cert_path(True)))

    def _call(self, operation: str, key: str, **arguments: Any) -> Any:
        """Make one request; every failure leaves as one of ours."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return getattr(self._client, operation)(Bucket=self._bucket, **arguments)
        except ClientError as error:
            raise self._translated(error, operation, key, arguments.get("IfMatch", "")) from error
        except (BotoCoreError, OSError, ValueError) as error:
            raise UnavailableError(
                "K2-UNA-001",
                f"The store did not answer: {type(error).__name__}.",
                where=self._where(key),
                retry=After(2.0),
            ) from error

    def _translated(self, error: Any, operation: str, key: str, if_match: str) -> Exception:
        answer = error.response.get("Error", {})
        code, meta = str(answer.get("Code", "")), error.response.get("ResponseMetadata", {})
        if operation == "put_object" and code in _CONDITION:
            failed = _condition_failed(self._where(key), "another object", if_match)
            failed.details["repeated"] = bool(meta.get("RetryAttempts"))
            return failed
        if code == "NoSuchUpload" and operation in ("upload_part", "complete_multipart_upload"):
            return UploadGoneError(
                "K2-UNA-001", "The upload was ended by somebody else.", where=self._where(key), retry=After(0.0)
            )
        if code in _MISSING or (code == "NoSuchUpload" and operation in ("abort_multipart_upload", "list_parts")):
            return NotThereError(key)
        if operation == "head_bucket" and code == "NoSuchBucket":
            return NotThereError(key)
        status = meta.get("HTTPStatusCode", "no status")
        return self._failed(code or str(status), str(answer.get("Message", "")), operation, key)

    def _refused(self, answer: Answer, key: str) -> UnavailableError:
        body = answer.beginning()
        code, message = _element(body, "Code") or str(answer.status), _element(body, "Message")
        if code in _MISSING:
            return UnavailableError(
                "K2-UNA-001",
                "The store does not hold the object.",
                where=self._where(key),
                hint="Run the release again: its pull step brings what is missing.",
            )
        return self._failed(code, message, "get_object", key)

    def _failed(self, code: str, message: str, operation: str, key: str) -> UnavailableError:
        return UnavailableError(
            "K2-UNA-001",
            f"The store answered {code} to {operation}: {message[:200]}",
            where=self._where(key),
            hint="Check the store's bucket and credentials." if code in _FINAL else "",
            retry=Never() if code in _FINAL else After(2.0),
        )

    def _where(self, key: str) -> str:
        return f"{self._endpoint.rstrip('/')}/{self._bucket}/{key}"


def _condition_failed(where: str, got: str, if_match: str) -> ConflictError:
    return ConflictError(
        "K2-CON-004",
        "The stored object is not the one this write was decided on.",
        where=where,
        got=got,
        expected=f"etag {if_match}".replace('"', "") if if_match else "no object",
    )


def _element(body: bytes, name: str) -> str:
    """Return what an error document of S3 says in an element; empty if it is none."""
    found = re.search(f"<{name}>([^<]*)</{name}>".encode(), body)
    return found.group(1).decode(errors="replace") if found else ""
