"""The identity of a media item: owns what goes into an mm_hash."""

from __future__ import annotations

import hashlib

_SCHEME = b"mm-hash-v1"


def mm_hash(data: bytes, *, processor_version: str, decode_options: str = "", salt: str = "") -> str:
    """Hex SHA-256 over length-prefixed fields, so that no two item lists run together.

    ``data`` are the encoded bytes (shape, mode and palette are in them); ``decode_options`` and
    ``processor_version`` are whatever else decides the embeddings; ``salt`` separates tenants.
    """
    digest = hashlib.sha256()
    for field in (_SCHEME, processor_version.encode(), decode_options.encode(), salt.encode(), data):
        digest.update(len(field).to_bytes(8, "big"))
        digest.update(field)
    return digest.hexdigest()
