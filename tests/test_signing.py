"""Keys and signatures: what is signed is believed, everything else is refused with its reason."""

from __future__ import annotations

import base64
import builtins
import stat
from pathlib import Path

import pytest

from neml2_build.errors import RequestError
from neml2_build.signing import SECRET_VARIABLE, Keys, Refused, key_id, keygen

pytest.importorskip("cryptography", reason="signatures need the package cryptography (extra neml2-build[signing])")


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, str]:
    _, text = keygen(tmp_path / "team.key")
    return tmp_path / "team.key", text


def load(*trusted: str, secret: Path | None = None, root: Path | None = None, environ: dict | None = None) -> Keys:
    keys = Keys.load(trusted, secret, root=root, environ=environ or {})
    assert keys is not None
    return keys


class TestKeygen:
    def test_a_secret_and_a_public_file(self, tmp_path: Path) -> None:
        public, text = keygen(tmp_path / "keys" / "team.key")
        secret = tmp_path / "keys" / "team.key"
        assert public == tmp_path / "keys" / "team.key.pub"
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
        assert stat.S_IMODE(public.stat().st_mode) == 0o644
        assert public.read_text() == f"{text}\n"
        assert len(base64.b64decode(text)) == 32
        assert secret.read_text() != public.read_text()

    @pytest.mark.parametrize("existing", ["team.key", "team.key.pub"])
    def test_keys_are_not_overwritten(self, tmp_path: Path, existing: str) -> None:
        (tmp_path / existing).write_text("precious")
        with pytest.raises(RequestError, match="exists already"):
            keygen(tmp_path / "team.key")
        assert [path.name for path in tmp_path.iterdir()] == [existing]
        assert (tmp_path / existing).read_text() == "precious"

    def test_every_pair_is_another(self, tmp_path: Path) -> None:
        assert keygen(tmp_path / "a")[1] != keygen(tmp_path / "b")[1]


class TestLoad:
    def test_nothing_configured_is_none(self) -> None:
        assert Keys.load(environ={}) is None

    def test_text_hexadecimal_and_file(self, pair: tuple[Path, str], tmp_path: Path) -> None:
        raw = base64.b64decode(pair[1])
        for text in (pair[1], raw.hex(), "team.key.pub", str(tmp_path / "team.key.pub")):
            assert load(text, root=tmp_path).trusted == {key_id(raw): raw}

    def test_a_public_file_may_have_a_comment(self, pair: tuple[Path, str], tmp_path: Path) -> None:
        (tmp_path / "c.pub").write_text(f"{pair[1]} build machine, 2026\n")
        assert load("c.pub", root=tmp_path).trusted == load(pair[1]).trusted

    def test_whoever_signs_trusts_itself(self, pair: tuple[Path, str]) -> None:
        keys = load(secret=pair[0])
        assert keys.trusted == load(pair[1]).trusted
        assert keys.secret

    def test_the_secret_may_be_a_variable(self, pair: tuple[Path, str]) -> None:
        assert load(environ={SECRET_VARIABLE: pair[0].read_text()}) == load(secret=pair[0])

    def test_the_secret_is_not_shown(self, pair: tuple[Path, str]) -> None:
        assert pair[0].read_text().strip() not in repr(load(secret=pair[0]))
        assert repr(load(secret=pair[0]).secret) not in repr(load(secret=pair[0]))

    @pytest.mark.parametrize("text", ["", "short", "no/such/file", base64.b64encode(b"x" * 31).decode(), "zz" * 32])
    def test_no_key_and_no_file(self, text: str, tmp_path: Path) -> None:
        with pytest.raises(RequestError) as caught:
            Keys.load([text], root=tmp_path, environ={})
        assert caught.value.exit_code == 2
        assert caught.value.remedy

    @pytest.mark.parametrize("content", [b"", b"nonsense", b"\xff\xfe\x00"])
    def test_a_file_that_holds_none(self, content: bytes, tmp_path: Path) -> None:
        (tmp_path / "k").write_bytes(content)
        for arguments in ((["k"], None), ([], "k")):
            with pytest.raises(RequestError):
                Keys.load(*arguments, root=tmp_path, environ={})

    def test_a_missing_secret(self, tmp_path: Path) -> None:
        with pytest.raises(RequestError, match="cannot be read") as caught:
            Keys.load([], "nowhere", root=tmp_path, environ={})
        assert caught.value.file == str(tmp_path / "nowhere")

    def test_without_the_package_nothing_is_believed_silently(
        self, pair: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        original = builtins.__import__

        def absent(name: str, *args, **kwargs):
            if name.startswith("cryptography"):
                raise ImportError(name)
            return original(name, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", absent)
        with pytest.raises(RequestError, match="cryptography") as caught:
            Keys.load([pair[1]], environ={})
        assert "neml2-build[signing]" in (caught.value.remedy or "")


class TestSignatures:
    def test_what_a_trusted_key_signed(self, pair: tuple[Path, str]) -> None:
        signature = load(secret=pair[0]).sign(b"message")
        assert signature is not None
        load(pair[1]).verify(b"message", [signature])

    def test_the_same_message_has_the_same_signature(self, pair: tuple[Path, str]) -> None:
        keys = load(secret=pair[0])
        assert keys.sign(b"message") == keys.sign(b"message")

    def test_readers_cannot_sign(self, pair: tuple[Path, str]) -> None:
        assert load(pair[1]).sign(b"message") is None

    def refusal(self, keys: Keys, message: bytes, *signatures: str) -> str:
        with pytest.raises(Refused) as caught:
            keys.verify(message, signatures)
        return caught.value.kind

    def test_everything_else_is_refused(self, pair: tuple[Path, str], tmp_path: Path) -> None:
        keygen(tmp_path / "other")
        signature = load(secret=pair[0]).sign(b"message") or ""
        other = load(secret=tmp_path / "other").sign(b"message") or ""
        keys = load(pair[1])
        signer = signature.partition(":")[0]
        assert self.refusal(keys, b"message") == "remote-unsigned"
        assert self.refusal(keys, b"Message", signature) == "remote-signature-wrong"
        assert self.refusal(keys, b"message", other) == "remote-unknown-key"
        assert self.refusal(keys, b"message", f"{signer}:{other.partition(':')[2]}") == "remote-signature-wrong"
        for text in ("", "!!!", "AAAA", base64.b64encode(b"x" * 64).decode()):
            assert self.refusal(keys, b"message", f"{signer}:{text}") == "remote-signature-wrong"
        assert self.refusal(keys, b"message", "", "nonsense") == "remote-unknown-key"

    def test_rotation(self, pair: tuple[Path, str], tmp_path: Path) -> None:
        """Both keys are trusted for a while; then what only the old one signed is refused."""
        _, new = keygen(tmp_path / "new")
        by_old = load(secret=pair[0]).sign(b"m") or ""
        by_new = load(secret=tmp_path / "new").sign(b"m") or ""
        both = load(pair[1], new)
        both.verify(b"m", [by_old])
        both.verify(b"m", [by_new])
        after = load(new)
        after.verify(b"m", [by_old, by_new])
        assert self.refusal(after, b"m", by_old) == "remote-unknown-key"
