"""Signatures of shared records: Ed25519, so that whoever reads a shared store need not be able to write it.

A compiled package is native code, and loading it runs it: whoever can put a record into a shared store that others
believe can run code on their machines. Therefore, as soon as a key is configured, a record from outside this machine is
believed only if a trusted key has signed it. What is signed is the whole record: the key of the action, the sha256 of
each of its contents, and what the key was made of. The local store is not signed: who can write it can run code already.

A key is named by its identifier, 16 hexadecimal digits of its sha256.

*Rotation*: make a new pair; add the new public key to ``trusted-keys`` beside the old one everywhere; give writers the new
secret; when what the old key signed has been made again or has been evicted, take the old public key out. A stolen
secret: take its public key out at once: everything it signed is a miss from then on. Empty the local stores that
were filled from it, because what is local is believed.

The package ``cryptography`` does the arithmetic, loaded when a key is first needed (extra ``neml2-build[signing]``).
PyNaCl would do as well; cryptography is what the machines of most users have already.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import RequestError

SECRET_VARIABLE = "NEML2_BUILD_SIGNING_KEY"
"""Environment variable with the text of a secret key: for CI systems, whose secrets are variables."""


class Refused(Exception):
    """Something from outside must not be used. *kind* is the named reason, *detail* its sentence."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


def key_id(public: bytes) -> str:
    """The identifier of the public key *public* (32 bytes)."""
    return hashlib.sha256(public).hexdigest()[:16]


@dataclass(frozen=True)
class Keys:
    """The keys of one run.

    Parameters
    ----------
    trusted
        Public keys (32 bytes) whose records are believed, by identifier.
    secret
        The secret key (32 bytes) with which this run signs what it shares; None: it cannot sign.
    """

    trusted: Mapping[str, bytes]
    secret: bytes | None = field(default=None, repr=False)

    @staticmethod
    def load(
        trusted: Iterable[str] = (),
        secret: Path | str | None = None,
        *,
        root: Path | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Keys | None:
        """The keys that the manifest names; None when it names none, and records are then used unsigned.

        Parameters
        ----------
        trusted
            Each the text of a public key (base64 or 64 hexadecimal digits), or the path of a file that begins with it.
        secret
            Path of the secret key. Its public half is trusted as well. Without it, :data:`SECRET_VARIABLE` may hold
            the secret's text.
        root
            Folder that relative paths are relative to.

        Raises
        ------
        RequestError
            A key cannot be read, is no key, or the package ``cryptography`` is not installed.
        """
        base = root or Path()
        public = [_public(text, base) for text in trusted]
        variable = (os.environ if environ is None else environ).get(SECRET_VARIABLE, "").strip()
        key = None
        if secret is not None:
            path = base / Path(secret).expanduser()
            key = _bytes(_text(path, "signing-key"), f"the signing key {path}")
        elif variable:
            key = _bytes(variable, f"the environment variable {SECRET_VARIABLE}")
        if key is not None:
            public.append(_raw(_ed25519().Ed25519PrivateKey.from_private_bytes(key).public_key()))
        if not public:
            return None
        _ed25519()
        return Keys({key_id(one): one for one in public}, key)

    def sign(self, message: bytes) -> str | None:
        """The signature of *message*, ``ID:BASE64``; None without a secret key."""
        if self.secret is None:
            return None
        key = _ed25519().Ed25519PrivateKey.from_private_bytes(self.secret)
        return f"{key_id(_raw(key.public_key()))}:{base64.b64encode(key.sign(message)).decode()}"

    def verify(self, message: bytes, signatures: Iterable[str]) -> None:
        """Return only if a trusted key signed exactly *message*.

        Raises
        ------
        Refused
            ``remote-unsigned``, ``remote-unknown-key`` or ``remote-signature-wrong``.
        """
        from cryptography.exceptions import InvalidSignature

        signers = []
        wrong = None
        for signature in signatures:
            signer, _, text = signature.partition(":")
            signers.append(signer)
            if signer not in self.trusted:
                continue
            try:
                key = _ed25519().Ed25519PublicKey.from_public_bytes(self.trusted[signer])
                key.verify(base64.b64decode(text, validate=True), message)
                return
            except (InvalidSignature, binascii.Error, ValueError):
                wrong = signer
        if wrong:
            raise Refused("remote-signature-wrong", f"it is not what key {wrong} signed")
        if signers:
            raise Refused("remote-unknown-key", f"signed by {', '.join(signers)[:200]}, which is not trusted")
        raise Refused("remote-unsigned", "no signature")


def keygen(path: Path | str) -> tuple[Path, str]:
    """Make a pair of keys: the secret at *path* (mode 0600), the public one beside it with ``.pub`` added.

    Returns
    -------
    tuple
        Path of the public key, and its text, which is what ``trusted-keys`` takes.

    Raises
    ------
    RequestError
        One of the files exists already, or cannot be written.
    """
    secret = Path(path)
    public = secret.with_name(f"{secret.name}.pub")
    key = _ed25519().Ed25519PrivateKey.generate()
    text = base64.b64encode(_raw(key.public_key())).decode()
    if public.exists():
        raise RequestError("the file exists already", file=public, remedy="choose another name; keys are not overwritten")
    try:
        secret.parent.mkdir(parents=True, exist_ok=True)
        for file, line, mode in ((secret, base64.b64encode(_raw(key)).decode(), 0o600), (public, text, 0o644)):
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "w") as stream:
                os.fchmod(stream.fileno(), mode)
                stream.write(f"{line}\n")
    except FileExistsError:
        raise RequestError(
            "the file exists already", file=secret, remedy="choose another name; keys are not overwritten"
        ) from None
    except OSError as error:
        raise RequestError(f"the key cannot be written: {error.strerror}", file=secret) from None
    return public, text


def _ed25519() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise RequestError(
            "signatures need the package cryptography, which is not installed",
            remedy="pip install 'neml2-build[signing]', or take trusted-keys and signing-key out of the manifest",
        ) from None
    return ed25519


def _raw(key: Any) -> bytes:
    return key.private_bytes_raw() if hasattr(key, "private_bytes_raw") else key.public_bytes_raw()


def _public(text: str, base: Path) -> bytes:
    try:
        return _bytes(text, "")
    except RequestError:
        path = base / Path(text).expanduser()
        if not path.is_file():
            raise RequestError(
                f"{text!r} is neither a public key nor a file that holds one",
                remedy="give the text that `neml2-build cache keygen` prints, or the path of its .pub file",
            ) from None
    return _bytes(_text(path, "trusted-keys"), f"the public key {path}")


def _text(path: Path, what: str) -> str:
    try:
        words = path.read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise RequestError(f"{what} cannot be read: {reason}", file=path) from None
    return words[0] if words else ""


def _bytes(text: str, what: str) -> bytes:
    """The 32 bytes that *text* spells."""
    try:
        key = bytes.fromhex(text) if len(text) == 64 else base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        key = b""
    if len(key) != 32:
        raise RequestError(
            f"{what} is no Ed25519 key (32 bytes, as base64 or 64 hexadecimal digits)",
            remedy="make one with `neml2-build cache keygen FILE`",
        )
    return key
