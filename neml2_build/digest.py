"""Content digests and the canonical JSON that keys are made of.

xxh3_128 is right for change detection: about 20 GB/s here, against 1.7 GB/s of sha256. It is not collision-resistant
against an attacker, so whatever crosses a trust boundary (a signed record of the shared store) carries sha256 as well.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import xxhash


def digest(data: bytes | str) -> str:
    """Digest of *data* (text is taken as UTF-8): 32 hexadecimal digits of xxh3_128."""
    return xxhash.xxh3_128_hexdigest(data.encode() if isinstance(data, str) else data)


def digest_file(path: Path | str) -> str:
    """Digest of the content of the file at *path*. Raises ``OSError`` where it cannot be read."""
    hasher = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as stream:
        while block := stream.read(1 << 20):
            hasher.update(block)
    return hasher.hexdigest()


def canonical_json(value: Any) -> bytes:
    """The one JSON text of *value*: keys sorted, no spaces, UTF-8. NaN and infinities are refused (``ValueError``)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def digest_json(value: Any) -> str:
    """Digest of the canonical JSON of *value*: what every key is."""
    return digest(canonical_json(value))
