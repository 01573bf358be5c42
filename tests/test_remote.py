"""The shared tier: what comes over it is verified, what goes wrong with it is a miss, and nothing of it fails a build."""

from __future__ import annotations

import builtins
import contextlib
import hashlib
import http.server
import multiprocessing
import os
import random
import shutil
import socket
import stat
import subprocess
import threading
import time
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from neml2_build import remote as module
from neml2_build import store as store_module
from neml2_build.digest import digest
from neml2_build.errors import RequestError
from neml2_build.remote import (
    AUTHORIZATION_VARIABLE,
    REASONS,
    WRITE_VARIABLE,
    FolderBackend,
    Opened,
    Remote,
    Sealed,
    blob_name,
    open_blob,
    open_record,
    open_remote,
    record_name,
    seal,
)
from neml2_build.signing import Keys, Refused, keygen
from neml2_build.store import Action, ObjectMissing, Output, Store


def key(name: str) -> str:
    return digest(f"key of {name}")


def make(store: Store, name: str, *contents: bytes, seconds: float = 2.0) -> Action:
    outputs = tuple(Output(f"{name}-{i}", *store.put(data)) for i, data in enumerate(contents))
    action = Action(key=key(name), stage="lower", target=name, outputs=outputs, made_of={"of": name}, seconds=seconds)
    store.record(action)
    return action


def kinds(store: Store) -> list[str]:
    return [event.kind for event in store.events]


class Memory:
    """A backend that counts, and that a test can make misbehave: *fault* is called before each answer."""

    label = "memory"

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}
        self.asked: list[tuple[str, str]] = []
        self.fault: Callable[[str, str], bytes | None] = lambda verb, name: None

    def get(self, name: str, limit: int) -> bytes | None:
        self.asked.append(("get", name))
        instead = self.fault("get", name)
        return instead if instead is not None else self.data.get(name)

    def put(self, name: str, data: bytes) -> None:
        self.asked.append(("put", name))
        self.fault("put", name)
        self.data[name] = data

    def has(self, name: str) -> bool:
        self.asked.append(("has", name))
        self.fault("has", name)
        return name in self.data

    def count(self, verb: str) -> int:
        return sum(asked == verb for asked, _ in self.asked)

    def names(self, kind: str) -> list[str]:
        return sorted(name for name in self.data if name.startswith(kind))


class World:
    """Two machines and what they share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.backend = Memory()
        self.number = 0

    def machine(self, *, write: bool = False, keys: Keys | None = None, timeout: float = 5.0) -> Store:
        self.number += 1
        remote = Remote(self.backend, write=write, timeout=timeout)
        return Store(self.folder / f"machine{self.number}", remote=remote, keys=keys)

    def publish(self, name: str, *contents: bytes, keys: Keys | None = None) -> Action:
        """Make something on a machine of its own that shares it."""
        with self.machine(write=True, keys=keys) as store:
            action = make(store, name, *contents)
            assert store.flush()
            assert store.events == []
        return action


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Keys, Keys]:
    """Those of a writer, and those of a reader."""
    pytest.importorskip("cryptography", reason="signatures need the package cryptography")
    _, public = keygen(tmp_path / "team.key")
    writer = Keys.load([], tmp_path / "team.key", environ={})
    reader = Keys.load([public], environ={})
    assert writer and reader
    return writer, reader


class TestSharing:
    def test_what_one_machine_made_another_finds(self, world: World) -> None:
        made = world.publish("eq", b"one" * 1000, b"two" * 1000)
        with world.machine() as store:
            assert store.find(made.key) == made
            assert [store.read(output.digest) for output in made.outputs] == [b"one" * 1000, b"two" * 1000]
            assert store.counts == {"hit-remote": 1}
            assert store.seconds_saved == 2.0
            assert store.remote
            assert store.remote.received == sum(map(len, world.backend.data.values())) - len(
                world.backend.data[record_name(made.key)]
            )
            assert store.events == []

    def test_what_was_fetched_is_local_from_then_on(self, world: World) -> None:
        made = world.publish("eq", b"one")
        store = world.machine()
        store.find(made.key)
        asked = len(world.backend.asked)
        assert store.find(made.key) == made
        assert len(world.backend.asked) == asked
        assert Store(store.root).find(made.key) == made

    def test_the_local_store_is_asked_first(self, world: World) -> None:
        store = world.machine()
        made = make(store, "eq", b"one")
        assert store.find(made.key) == made
        assert world.backend.asked == []

    def test_a_miss_is_asked_once_a_run(self, world: World) -> None:
        store = world.machine()
        assert store.find(key("eq")) is None
        assert store.find(key("eq")) is None
        assert world.backend.asked == [("get", record_name(key("eq")))]
        assert store.counts == {"miss-no-record": 1}
        assert store.events == []

    def test_contents_that_are_here_are_not_fetched(self, world: World) -> None:
        made = world.publish("eq", b"common", b"other")
        store = world.machine()
        store.put(b"common")
        assert store.find(made.key) == made
        assert world.backend.count("get") == 2

    def test_contents_that_are_there_are_not_sent_again(self, world: World) -> None:
        world.publish("a", b"common")
        puts = world.backend.count("put")
        world.publish("b", b"common")
        assert world.backend.count("put") == puts + 1
        assert len(world.backend.names("cas/")) == 1

    def test_a_lost_local_object_comes_back(self, world: World) -> None:
        made = world.publish("eq", b"one")
        store = world.machine()
        store.find(made.key)
        shutil.rmtree(store.root / "objects")
        assert store.find(made.key) == made
        assert store.read(made.outputs[0].digest) == b"one"
        assert kinds(store) == ["object-missing"]

    def test_readers_write_nothing(self, world: World) -> None:
        store = world.machine()
        make(store, "eq", b"one")
        assert store.flush()
        assert world.backend.asked == []

    def test_what_was_fetched_is_not_sent_back(self, world: World) -> None:
        made = world.publish("eq", b"one")
        puts = world.backend.count("put")
        with world.machine(write=True) as store:
            assert store.find(made.key)
            assert store.flush()
        assert world.backend.count("put") == puts

    def test_a_record_goes_after_its_contents(self, world: World) -> None:
        world.publish("eq", b"one", b"two")
        assert [name[:3] for verb, name in world.backend.asked if verb == "put"] == ["cas", "cas", "ac/"]

    def test_many_at_once(self, world: World) -> None:
        with world.machine(write=True) as store:
            made = [make(store, f"{i}", f"content {i}".encode() * 50) for i in range(40)]
            assert store.flush()
        assert len(world.backend.names("ac/")) == 40
        with world.machine() as store:
            threads = [threading.Thread(target=store.find, args=(action.key,)) for action in made]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert store.counts == {"hit-remote": 40}
            assert store.check().ok

    def test_what_is_lost_again_while_it_comes_is_a_miss(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        made = world.publish("eq", b"one")
        store = world.machine()

        def accept(*_: object) -> None:
            raise ObjectMissing

        monkeypatch.setattr(store, "accept", accept)
        assert store.find(made.key) is None
        assert store.counts == {"miss-object-missing": 1}

    def test_a_store_that_cannot_be_written_still_fetches(self, world: World) -> None:
        made = world.publish("eq", b"one")
        store = Store(world.folder / "readonly", remote=Remote(world.backend), readonly=True)
        assert store.find(made.key) == made
        assert store.read(made.outputs[0].digest) == b"one"
        assert not (world.folder / "readonly").exists()

    def test_names_are_those_of_bazels_protocol(self, world: World) -> None:
        made = world.publish("eq", b"one" * 100)
        (name,) = world.backend.names("cas/")
        packed = world.backend.data[name]
        assert name == f"cas/{hashlib.sha256(packed).hexdigest()}"
        assert zlib.decompress(packed) == b"one" * 100
        expected = hashlib.sha256(f"neml2-build action 1\n{made.key}".encode()).hexdigest()
        assert world.backend.names("ac/") == [f"ac/{expected}"]

    def test_records_are_bazel_messages(self, world: World) -> None:
        """Read by a decoder of protocol buffers written from their specification, not by ours."""
        made = world.publish("eq", b"one" * 100)
        data = world.backend.data[record_name(made.key)]
        top = dict(_fields(data))
        file = dict(_fields(top[2]))
        hashed = dict(_fields(file[2]))
        assert file[1] == b"eq-0"
        assert f"cas/{hashed[1].decode()}" in world.backend.data
        assert hashed[2] == len(world.backend.data[f"cas/{hashed[1].decode()}"])
        assert dict(_fields(top[9]))[1] == b"neml2-build"


def _fields(data: bytes) -> Iterator[tuple[int, bytes | int]]:
    def number() -> int:
        nonlocal data
        value = 0
        for i, byte in enumerate(data):
            value += (byte & 127) << 7 * i
            if byte < 128:
                data = data[i + 1 :]
                return value
        raise ValueError

    while data:
        tag = number()
        if tag & 7 == 0:
            yield tag >> 3, number()
        else:
            assert tag & 7 == 2
            size = number()
            yield tag >> 3, data[:size]
            data = data[size:]


class TestLies:
    """A remote that says something else than what was written is not believed, and the build goes on."""

    def refused(self, world: World, made: Action, kind: str, store: Store | None = None) -> Store:
        store = store or world.machine()
        assert store.find(made.key) is None
        assert kinds(store) == [kind]
        assert store.counts == {f"miss-{kind}": 1}
        assert store.peek(made.key) is None
        assert store.check().ok
        remade = make(store, made.target, b"made again")
        assert store.find(made.key) == remade
        return store

    def test_another_keys_record(self, world: World) -> None:
        one, two = world.publish("one", b"1"), world.publish("two", b"2")
        world.backend.data[record_name(one.key)] = world.backend.data[record_name(two.key)]
        self.refused(world, one, "remote-replayed")

    def test_swapped_contents(self, world: World) -> None:
        made = world.publish("one", b"1" * 100)
        world.publish("two", b"2" * 100)
        data = world.backend.data
        first, second = world.backend.names("cas/")
        data[first], data[second] = data[second], data[first]
        store = self.refused(world, made, "remote-object-broken")
        assert not store.has(made.outputs[0].digest)

    def test_lost_contents(self, world: World) -> None:
        made = world.publish("one", b"1")
        del world.backend.data[world.backend.names("cas/")[0]]
        self.refused(world, made, "remote-object-missing")

    @pytest.mark.parametrize("cut", [0, 1, 20, -1])
    def test_truncated_contents(self, world: World, cut: int) -> None:
        made = world.publish("one", os.urandom(1000))
        name = world.backend.names("cas/")[0]
        world.backend.data[name] = world.backend.data[name][:cut]
        self.refused(world, made, "remote-object-broken")

    def test_longer_contents(self, world: World) -> None:
        made = world.publish("one", b"1")
        world.backend.data[world.backend.names("cas/")[0]] += b"x"
        self.refused(world, made, "remote-object-broken")

    def test_every_truncated_record(self, world: World) -> None:
        made = world.publish("one", b"1")
        good = world.backend.data[record_name(made.key)]
        end = good.index(b"neml2-build") - 4  # what follows our field is the server's
        for size in range(end):
            with pytest.raises(Refused) as caught:
                open_record(good[:size], made.key, None)
            assert caught.value.kind == "remote-record-broken", size

    def test_what_is_no_record(self, world: World) -> None:
        made = world.publish("one", b"1")
        for text in (b"<html>404</html>", b"\x00" * 100, b"{}", b"\xff" * 9, module._field(5, zlib.compress(b"{}"))):
            world.backend.data[record_name(made.key)] = text
            self.refused(world, made, "remote-record-broken")

    def test_another_versions_record(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(module, "FORMAT", 99)
            made = world.publish("one", b"1")
        self.refused(world, made, "remote-record-version")

    def test_contents_that_explode_are_not_inflated(self, world: World) -> None:
        """A record that promises 5 bytes, with contents that inflate to a hundred megabytes."""
        data = b"small"
        action = Action(key=key("x"), stage="s", target="t", outputs=(Output("o", digest(data), 5),))
        sealed = seal(action, {digest(data): data}, None)
        opened = open_record(sealed.record, action.key, None)
        bomb = zlib.compress(bytes(100_000_000), 9)
        blob = module._Blob(hashlib.sha256(bomb).hexdigest(), len(bomb))
        with pytest.raises(Refused, match="larger than it may be"):
            open_blob(bomb, action.outputs[0], Opened(action, opened.sha256, {digest(data): blob}, ()))

    @pytest.mark.parametrize("name", ["../../etc/passwd", "0" * 31 + "/", "a" * 33, ""])
    def test_digests_that_are_none_are_refused(self, world: World, name: str) -> None:
        action = Action(key=key("x"), stage="s", target="x", outputs=(Output("o", name, 1),))
        self.serve(world, action, seal(action, {name: b"x"}, None))

    @pytest.mark.parametrize("name", ["../o", "a/../../o", "/etc/passwd", "", "a//b", "a\\..\\b", "a\0", "."])
    def test_output_names_that_lead_elsewhere_are_refused(self, world: World, name: str) -> None:
        action = Action(key=key("x"), stage="s", target="x", outputs=(Output(name, digest(b"x"), 1),))
        self.serve(world, action, seal(action, {digest(b"x"): b"x"}, None))

    def test_a_negative_size_is_refused(self, world: World) -> None:
        action = Action(key=key("x"), stage="s", target="x", outputs=(Output("o", digest(b"x"), -5),))
        self.serve(world, action, seal(action, {digest(b"x"): b"x"}, None))

    def serve(self, world: World, action: Action, sealed: Sealed) -> None:
        world.backend.data[sealed.name] = sealed.record
        world.backend.data.update(sealed.blobs)
        self.refused(world, action, "remote-record-broken")

    def test_every_flipped_byte_of_a_record_is_refused_or_harmless(self, world: World) -> None:
        made = world.publish("one", b"1")
        good = world.backend.data[record_name(made.key)]
        for position in range(len(good)):
            bad = good[:position] + bytes([good[position] ^ 0x55]) + good[position + 1 :]
            try:
                assert open_record(bad, made.key, None).action == made
            except Refused as refusal:
                assert refusal.kind == "remote-record-broken"

    def test_a_record_nested_without_end(self, world: World) -> None:
        made = world.publish("one", b"1")
        body = '{"format":1,"action":' + "[" * 100_000
        envelope = msgspec.json.encode({"body": body, "signatures": [], "blobs": {}})
        world.backend.data[record_name(made.key)] = module._field(5, zlib.compress(envelope))
        self.refused(world, made, "remote-record-broken")

    def test_many_lies_end_the_conversation(self, world: World) -> None:
        made = [world.publish(f"{i}", f"{i}".encode()) for i in range(8)]
        for name in world.backend.names("cas/"):
            world.backend.data[name] = b"lie"
        world.backend.asked.clear()
        store = world.machine()
        for action in made:
            assert store.find(action.key) is None
        assert kinds(store) == ["remote-object-broken"] * 5 + ["remote-off"]
        assert world.backend.count("get") == 10
        assert store.counts == {"miss-remote-object-broken": 5, "miss-remote-off": 3}

    def test_a_writer_mends_what_was_broken(self, world: World) -> None:
        made = world.publish("eq", b"one")
        (name,) = world.backend.names("cas/")
        world.backend.data[name] = b"broken"
        with world.machine(write=True) as store:
            assert store.find(made.key) is None
            make(store, "eq", b"one")
            assert store.flush()
        with world.machine() as store:
            assert store.find(made.key)


class TestSigned:
    def test_signed_by_a_writer_read_by_a_reader(self, world: World, keys: tuple[Keys, Keys]) -> None:
        writer, reader = keys
        made = world.publish("eq", b"one", keys=writer)
        with world.machine(keys=reader) as store:
            assert store.find(made.key) == made
            assert store.events == []
            assert len(store.signatures(made.key)) == 1

    def refused(self, world: World, made: Action, reader: Keys, kind: str) -> None:
        world.backend.asked.clear()
        store = world.machine(keys=reader)
        assert store.find(made.key) is None
        assert kinds(store) == [kind]
        assert world.backend.count("get") == 1, "contents of a record that is not believed are not fetched"
        assert not (store.root / "objects").exists()

    def test_unsigned(self, world: World, keys: tuple[Keys, Keys]) -> None:
        self.refused(world, world.publish("eq", b"one"), keys[1], "remote-unsigned")

    def test_signed_by_a_stranger(self, world: World, keys: tuple[Keys, Keys], tmp_path: Path) -> None:
        keygen(tmp_path / "stranger")
        stranger = Keys.load([], tmp_path / "stranger", environ={})
        self.refused(world, world.publish("eq", b"one", keys=stranger), keys[1], "remote-unknown-key")

    def test_replayed_under_another_key(self, world: World, keys: tuple[Keys, Keys]) -> None:
        one, two = world.publish("one", b"1", keys=keys[0]), world.publish("two", b"2", keys=keys[0])
        world.backend.data[record_name(one.key)] = world.backend.data[record_name(two.key)]
        self.refused(world, one, keys[1], "remote-replayed")

    def alter(self, world: World, made: Action, change: Callable[[dict], None]) -> None:
        """Rewrite the record as somebody without a key could."""
        name = record_name(made.key)
        envelope = msgspec.json.decode(zlib.decompress(module._from_message(world.backend.data[name])))
        change(envelope)
        world.backend.data[name] = module._field(5, zlib.compress(msgspec.json.encode(envelope)))

    def test_an_altered_body(self, world: World, keys: tuple[Keys, Keys]) -> None:
        made = world.publish("eq", b"one", keys=keys[0])
        good = digest(b"one")
        evil = hashlib.sha256(b"two").hexdigest()

        def change(envelope: dict) -> None:
            body = envelope["body"]
            assert good in body
            envelope["body"] = body.replace(hashlib.sha256(b"one").hexdigest(), evil)

        self.alter(world, made, change)
        self.refused(world, made, keys[1], "remote-signature-wrong")

    def test_one_more_space_in_the_body(self, world: World, keys: tuple[Keys, Keys]) -> None:
        made = world.publish("eq", b"one", keys=keys[0])
        self.alter(world, made, lambda envelope: envelope.update(body=envelope["body"] + " "))
        self.refused(world, made, keys[1], "remote-signature-wrong")

    def test_the_signature_of_another_record(self, world: World, keys: tuple[Keys, Keys]) -> None:
        one, two = world.publish("one", b"1", keys=keys[0]), world.publish("two", b"2", keys=keys[0])
        taken: list = []
        self.alter(world, two, lambda envelope: taken.extend(envelope["signatures"]))
        self.alter(world, one, lambda envelope: envelope.update(signatures=taken))
        self.refused(world, one, keys[1], "remote-signature-wrong")

    def test_where_the_contents_are_is_not_signed_but_what_they_are_is(self, world: World, keys: tuple[Keys, Keys]) -> None:
        made = world.publish("eq", b"one", keys=keys[0])
        evil = zlib.compress(b"two")
        sha256 = hashlib.sha256(evil).hexdigest()
        world.backend.data[blob_name(sha256)] = evil
        blob = {"sha256": sha256, "size": len(evil)}
        self.alter(world, made, lambda envelope: envelope.update(blobs={made.outputs[0].digest: blob}))
        store = world.machine(keys=keys[1])
        assert store.find(made.key) is None
        assert kinds(store) == ["remote-object-broken"]
        assert not store.has(digest(b"two"))

    def test_contents_that_collide_in_xxh3_do_not_pass(
        self, world: World, keys: tuple[Keys, Keys], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """xxh3 can be collided by who wants to; the signed sha256 cannot."""
        made = world.publish("eq", b"one", keys=keys[0])
        evil = zlib.compress(b"two")
        blob = {"sha256": hashlib.sha256(evil).hexdigest(), "size": len(evil)}
        world.backend.data[blob_name(blob["sha256"])] = evil
        self.alter(world, made, lambda envelope: envelope.update(blobs={made.outputs[0].digest: blob}))
        monkeypatch.setattr(module, "digest", lambda data: made.outputs[0].digest)
        store = world.machine(keys=keys[1])
        assert store.find(made.key) is None
        assert kinds(store) == ["remote-object-broken"]

    def test_a_writer_without_a_secret_does_not_write(self, world: World, keys: tuple[Keys, Keys]) -> None:
        with world.machine(write=True, keys=keys[1]) as store:
            make(store, "a", b"1")
            make(store, "b", b"2")
            assert store.flush()
            assert kinds(store) == ["remote-write-off"]
        assert world.backend.asked == []

    def test_many_unsigned_records_do_not_hide_the_signed_ones(self, world: World, keys: tuple[Keys, Keys]) -> None:
        strangers = [world.publish(f"{i}", b"x") for i in range(10)]
        ours = world.publish("ours", b"ours", keys=keys[0])
        store = world.machine(keys=keys[1])
        for action in strangers:
            assert store.find(action.key) is None
        assert store.find(ours.key) == ours


class TestTrouble:
    """A remote that fails costs one warning, then nothing."""

    def test_one_failure_is_tried_again(self, world: World) -> None:
        made = world.publish("eq", b"one")
        failures = [OSError("reset"), None, OSError("reset")]

        def fault(verb: str, name: str) -> None:
            if failures and (failure := failures.pop()):
                raise failure

        world.backend.fault = fault
        with world.machine() as store:
            assert store.find(made.key) == made
            assert store.events == []

    def test_then_it_is_left_alone(self, world: World) -> None:
        def fault(verb: str, name: str) -> None:
            raise ConnectionRefusedError("Connection refused")

        world.backend.fault = fault
        store = world.machine(write=True)
        for i in range(10):
            assert store.find(key(f"{i}")) is None
            make(store, f"{i}", b"x")
        assert store.flush()
        assert [(event.kind, event.detail) for event in store.events] == [("remote-off", "Connection refused")]
        assert world.backend.count("get") == 2
        assert world.backend.count("put") == 0
        assert store.counts == {"miss-remote-off": 10}

    def test_any_exception_is_a_failure(self, world: World) -> None:
        def fault(verb: str, name: str) -> None:
            raise RuntimeError

        world.backend.fault = fault
        store = world.machine()
        assert store.find(key("a")) is None
        assert [(event.kind, event.detail) for event in store.events] == [("remote-off", "RuntimeError")]

    def test_a_remote_that_hangs(self, world: World) -> None:
        released = threading.Event()
        world.backend.fault = lambda verb, name: released.wait(60) and None
        store = world.machine(timeout=0.02)
        start = time.perf_counter()
        assert store.find(key("a")) is None
        assert store.find(key("b")) is None
        assert time.perf_counter() - start < 5
        assert kinds(store) == ["remote-off"]
        assert "no answer" in store.events[0].detail
        released.set()

    def test_a_full_remote_is_still_read(self, world: World) -> None:
        made = world.publish("eq", b"one")

        def fault(verb: str, name: str) -> None:
            if verb == "put":
                raise OSError("HTTP 507 Insufficient Storage")

        world.backend.fault = fault
        with world.machine(write=True) as store:
            for i in range(5):
                make(store, f"{i}", f"{i}".encode())
            assert store.flush()
            assert store.find(made.key) == made
            assert kinds(store) == ["remote-write-off"]

    def test_uploads_that_do_not_end_are_given_up(self, world: World) -> None:
        released = threading.Event()

        def fault(verb: str, name: str) -> None:
            if verb == "put":
                released.wait(60)

        world.backend.fault = fault
        store = world.machine(write=True, timeout=30)
        make(store, "a", b"1")
        assert not store.flush(0.01)
        assert kinds(store) == ["remote-upload-unfinished"]
        assert "1 not written" in store.events[0].detail
        released.set()

    def test_what_is_gone_before_it_was_sent_is_not_sent(self, world: World) -> None:
        gate = threading.Event()
        world.backend.fault = lambda verb, name: gate.wait(10) and None
        with world.machine(write=True) as store:
            first = [make(store, f"{i}", f"{i}".encode()) for i in range(4)]  # every thread is busy
            last = make(store, "last", b"last")
            path = store.root / "objects" / last.outputs[0].digest[:2] / last.outputs[0].digest[2:]
            path.unlink()
            gate.set()
            assert store.flush()
            assert store.events == []
        assert world.backend.names("ac/") == sorted(record_name(action.key) for action in first)

    def test_every_reason_is_explained(self) -> None:
        assert not REASONS.keys() & store_module.REASONS.keys()
        assert all(kind.startswith("remote-") and text[0].islower() for kind, text in REASONS.items())


class TestFolder:
    def test_a_shared_folder(self, tmp_path: Path) -> None:
        writer = Store(tmp_path / "a", remote=open_remote("shared", write=True, root=tmp_path, environ={}))
        made = make(writer, "eq", b"one")
        assert writer.flush()
        reader = Store(tmp_path / "b", remote=open_remote(f"file://{tmp_path}/shared", environ={}))
        assert reader.find(made.key) == made
        names = sorted(str(path.relative_to(tmp_path / "shared")) for path in (tmp_path / "shared").rglob("*"))
        assert [name[:5] for name in names] == [*sorted(["ac", record_name(made.key)[:5]]), "cas", names[3][:5], "tmp"]
        mode = (tmp_path / "shared" / record_name(made.key)).stat().st_mode
        assert stat.S_IMODE(mode) & 0o444 == 0o444 & ~_umask()

    def test_a_folder_that_is_not_there_is_one_warning(self, tmp_path: Path) -> None:
        store = Store(tmp_path / "a", remote=open_remote(str(tmp_path / "no where"), environ={}))
        assert store.find(key("a")) is None
        assert store.find(key("b")) is None
        assert [event.kind for event in store.events] == ["remote-off"]
        assert "does not exist" in store.events[0].detail
        assert not (tmp_path / "no where").exists()

    def test_an_empty_folder_is_fine(self, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        store = Store(tmp_path / "a", remote=open_remote(str(tmp_path / "empty"), environ={}))
        assert store.find(key("a")) is None
        assert store.events == []


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


class TestAddress:
    @pytest.mark.parametrize(
        ("write", "variable", "expected"),
        [(False, None, False), (True, None, True), (False, "1", True), (False, "0", False), (False, "", False)],
    )
    def test_reading_only_unless_told(self, write: bool, variable: str | None, expected: bool) -> None:
        environ = {} if variable is None else {WRITE_VARIABLE: variable}
        assert open_remote("/shared", write=write, environ=environ).write is expected

    def test_credentials_are_not_shown(self) -> None:
        remote = open_remote("https://user:secret@cache.example/team/", environ={})
        assert remote.label == "https://cache.example/team"

    def test_without_fsspec_the_extra_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        original = builtins.__import__

        def absent(name: str, *args, **kwargs):
            if name.startswith("fsspec"):
                raise ImportError(name)
            return original(name, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", absent)
        with pytest.raises(RequestError, match="fsspec") as caught:
            open_remote("s3://bucket/prefix", environ={})
        assert "neml2-build[remote]" in (caught.value.remedy or "")

    def test_an_unknown_kind(self) -> None:
        pytest.importorskip("fsspec", reason="needs fsspec (extra neml2-build[remote])")
        with pytest.raises(RequestError, match="no kind that is known"):
            open_remote("nonsense://bucket", environ={})

    def test_fsspec(self, tmp_path: Path) -> None:
        pytest.importorskip("fsspec", reason="needs fsspec (extra neml2-build[remote])")
        url = f"memory://{uuid.uuid4()}/prefix"
        writer = Store(tmp_path / "a", remote=open_remote(url, write=True, environ={}))
        made = make(writer, "eq", b"one", b"two")
        assert writer.flush()
        assert writer.events == []
        reader = Store(tmp_path / "b", remote=open_remote(url, environ={}))
        assert reader.find(made.key) == made
        assert reader.find(key("other")) is None
        assert reader.events == []


class Server(http.server.ThreadingHTTPServer):
    """A cache server that a test can make misbehave: *fault* answers the request itself, and says so with True."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.data: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.headers: list[dict[str, str]] = []
        self.fault: Callable[[Handler], bool] = lambda handler: False
        self.released = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}/team"

    def handle_error(self, request, client_address) -> None:
        pass  # clients that gave up


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, code: int, data: bytes = b"", length: int | None = None) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(data) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def handle_one(self) -> None:
        self.server.requests.append((self.command, self.path))
        self.server.headers.append(dict(self.headers))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.server.fault(self):
            return
        if self.command == "PUT":
            self.server.data[self.path] = body
            self.answer(201)
        elif self.path in self.server.data:
            self.answer(200, self.server.data[self.path])
        else:
            self.answer(404, b"not here")

    do_GET = do_PUT = do_HEAD = handle_one


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as one:
        thread = threading.Thread(target=one.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield one
        one.released.set()
        one.shutdown()
        thread.join()


class TestHttp:
    def machine(self, server: Server, tmp_path: Path, name: str, *, write: bool = False, timeout: float = 10) -> Store:
        remote = open_remote(server.url, write=write, timeout=timeout, environ={})
        return Store(tmp_path / name, remote=remote)

    def publish(self, server: Server, tmp_path: Path, name: str, *contents: bytes) -> Action:
        store = self.machine(server, tmp_path, f"writer of {name}", write=True)
        made = make(store, name, *contents)
        assert store.flush()
        assert store.events == []
        return made

    def test_bazels_protocol(self, server: Server, tmp_path: Path) -> None:
        made = self.publish(server, tmp_path, "eq", b"one" * 100)
        (cas,) = (path for path in server.data if "/cas/" in path)
        assert server.requests == [("HEAD", cas), ("PUT", cas), ("PUT", f"/team/{record_name(made.key)}")]
        server.requests.clear()
        reader = self.machine(server, tmp_path, "reader")
        assert reader.find(made.key) == made
        assert server.requests == [("GET", f"/team/{record_name(made.key)}"), ("GET", cas)]
        assert reader.find(key("no")) is None
        assert reader.events == []

    @pytest.mark.parametrize("code", [500, 503, 403, 401])
    def test_it_answers_with_an_error(self, server: Server, tmp_path: Path, code: int) -> None:
        server.fault = lambda handler: handler.answer(code, b"no") or True
        store = self.machine(server, tmp_path, "reader")
        assert store.find(key("a")) is None
        assert store.find(key("b")) is None
        assert [event.kind for event in store.events] == ["remote-off"]
        assert f"HTTP {code}" in store.events[0].detail
        assert len(server.requests) == 2

    def test_it_hangs(self, server: Server, tmp_path: Path) -> None:
        server.fault = lambda handler: server.released.wait(60)
        store = self.machine(server, tmp_path, "reader", timeout=0.05)
        assert store.find(key("a")) is None
        assert [event.kind for event in store.events] == ["remote-off"]

    def test_it_drips(self, server: Server, tmp_path: Path) -> None:
        """Each byte comes in time, all of them never."""
        made = self.publish(server, tmp_path, "eq", b"one")

        def drip(handler: Handler) -> bool:
            handler.send_response(200)
            handler.send_header("Content-Length", "1000000")
            handler.end_headers()
            while not server.released.wait(0.02):
                handler.wfile.write(b"x")
            return True

        server.fault = drip
        store = self.machine(server, tmp_path, "reader", timeout=0.1)
        assert store.find(made.key) is None
        assert [event.kind for event in store.events] == ["remote-off"]
        assert "no answer within" in store.events[0].detail

    def test_it_truncates(self, server: Server, tmp_path: Path) -> None:
        made = self.publish(server, tmp_path, "eq", os.urandom(5000))

        def cut(handler: Handler) -> bool:
            if "/cas/" not in handler.path:
                return False
            data = server.data[handler.path]
            handler.answer(200, data[:1000], len(data))
            handler.close_connection = True
            return True

        server.fault = cut
        store = self.machine(server, tmp_path, "reader")
        assert store.find(made.key) is None
        assert [event.kind for event in store.events] == ["remote-off"]
        assert not store.has(made.outputs[0].digest)

    def test_it_truncates_and_says_nothing(self, server: Server, tmp_path: Path) -> None:
        made = self.publish(server, tmp_path, "eq", os.urandom(5000))
        for path in server.data:
            if "/cas/" in path:
                server.data[path] = server.data[path][:1000]
        store = self.machine(server, tmp_path, "reader")
        assert store.find(made.key) is None
        assert [event.kind for event in store.events] == ["remote-object-broken"]

    def test_it_swaps_contents(self, server: Server, tmp_path: Path) -> None:
        made = self.publish(server, tmp_path, "a", b"a" * 500)
        self.publish(server, tmp_path, "b", b"b" * 500)
        one, two = (path for path in server.data if "/cas/" in path)
        server.data[one], server.data[two] = server.data[two], server.data[one]
        store = self.machine(server, tmp_path, "reader")
        assert store.find(made.key) is None
        assert [event.kind for event in store.events] == ["remote-object-broken"]

    def test_it_answers_with_another_keys_record(self, server: Server, tmp_path: Path) -> None:
        a, b = (self.publish(server, tmp_path, name, name.encode()) for name in "ab")
        server.data[f"/team/{record_name(a.key)}"] = server.data[f"/team/{record_name(b.key)}"]
        store = self.machine(server, tmp_path, "reader")
        assert store.find(a.key) is None
        assert [event.kind for event in store.events] == ["remote-replayed"]
        assert store.find(b.key) == b

    def test_it_sends_without_end(self, server: Server, tmp_path: Path) -> None:
        made = self.publish(server, tmp_path, "eq", b"one")
        for path in server.data:
            if "/cas/" in path:
                server.data[path] = bytes(10_000_000)
        store = self.machine(server, tmp_path, "reader")
        assert store.find(made.key) is None
        assert [event.kind for event in store.events] == ["remote-object-broken"]

    def test_it_is_full(self, server: Server, tmp_path: Path) -> None:
        server.fault = lambda handler: handler.command == "PUT" and (handler.answer(507, b"full") or True)
        store = self.machine(server, tmp_path, "writer", write=True)
        for name in "abc":
            make(store, name, name.encode())
        assert store.flush()
        assert [event.kind for event in store.events] == ["remote-write-off"]
        assert "HTTP 507" in store.events[0].detail

    def test_what_is_there_already_may_not_be_overwritten(self, server: Server, tmp_path: Path) -> None:
        server.fault = lambda handler: handler.command == "PUT" and (handler.answer(409) or True)
        store = self.machine(server, tmp_path, "writer", write=True)
        make(store, "a", b"a")
        assert store.flush()
        assert store.events == []

    def test_a_server_without_head(self, server: Server, tmp_path: Path) -> None:
        server.fault = lambda handler: handler.command == "HEAD" and (handler.answer(501) or True)
        self.publish(server, tmp_path, "a", b"a")
        assert len(server.data) == 2

    def test_nobody_listens(self, tmp_path: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{free.getsockname()[1]}"
            store = Store(tmp_path / "a", remote=open_remote(url, environ={}))
            assert store.find(key("a")) is None
        assert [event.kind for event in store.events] == ["remote-off"]

    @pytest.mark.parametrize(
        ("user", "variable", "expected"),
        [("", None, None), ("me:p%40ss@", None, "Basic bWU6cEBzcw=="), ("", "Bearer token", "Bearer token")],
    )
    def test_credentials(self, server: Server, tmp_path: Path, user: str, variable: str | None, expected: str | None) -> None:
        url = server.url.replace("http://", f"http://{user}")
        environ = {AUTHORIZATION_VARIABLE: variable} if variable else {}
        Store(tmp_path / "a", remote=open_remote(url, environ=environ)).find(key("a"))
        assert server.headers[0].get("Authorization") == expected


NGINX = """
daemon off; master_process off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 64; }}
http {{
  access_log off; client_body_temp_path {folder}/body; client_max_body_size 1g;
  proxy_temp_path {folder}/t1; fastcgi_temp_path {folder}/t2; uwsgi_temp_path {folder}/t3; scgi_temp_path {folder}/t4;
  server {{ listen 127.0.0.1:{port}; root {folder}/data;
    location / {{ dav_methods PUT; create_full_put_path on; dav_access user:rw group:r all:r; }} }}
}}
"""


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed (apt-get install nginx-light)")
def test_nginx_serves_a_shared_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "data").mkdir()
    (tmp_path / "conf").write_text("user root;" * (os.getuid() == 0) + NGINX.format(folder=tmp_path, port=port))
    process = subprocess.Popen(["nginx", "-p", str(tmp_path), "-c", str(tmp_path / "conf")])
    try:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
        url = f"http://127.0.0.1:{port}/prefix"
        writer = Store(tmp_path / "a", remote=open_remote(url, write=True, environ={}))
        made = make(writer, "eq", b"one" * 100_000, b"")
        assert writer.flush()
        assert writer.events == []
        reader = Store(tmp_path / "b", remote=open_remote(url, environ={}))
        assert reader.find(made.key) == made
        assert reader.events == []
        folder = Store(tmp_path / "c", remote=open_remote(str(tmp_path / "data" / "prefix"), environ={}))
        assert folder.find(made.key) == made
    finally:
        process.terminate()
        process.wait(10)


def test_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    server_module = pytest.importorskip("moto.server", reason="moto[server], a local S3 server, is not installed")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "no_proxy": "127.0.0.1",
        }.items():
            monkeypatch.setenv(name, value)
        import s3fs  # pyright: ignore[reportMissingImports]

        s3fs.S3FileSystem(skip_instance_cache=True).mkdir("team")
        writer = Store(tmp_path / "a", remote=open_remote("s3://team/cache", write=True, environ={}))
        made = make(writer, "eq", b"one" * 100_000, b"two")
        assert writer.flush()
        assert writer.events == []
        reader = Store(tmp_path / "b", remote=open_remote("s3://team/cache", environ={}))
        assert reader.find(made.key) == made
        assert reader.find(key("no")) is None
        assert reader.events == []
    finally:
        server.stop()


def _content(name: str) -> bytes:
    return (f"content of {name} " * (100 + int(name) % 7 * 50)).encode()


def _builder(root: str, shared: str, seed: int, log: str) -> None:
    """Build keys in random order for ever: each right, or made; sometimes damage, collect, or check the store."""
    chance = random.Random(seed)
    with open(log, "ab", buffering=0) as out:
        while True:
            write = chance.random() < 0.7
            with Store(Path(root), remote=Remote(FolderBackend(Path(shared), create=True), write=write)) as store:
                for _ in range(30):
                    name = str(chance.randrange(60))
                    for _ in range(5):  # what another removed between find and read is made again
                        with store.lock(key(name)):
                            action = store.find(key(name))
                            if action is None:
                                made = tuple(Output(part, *store.put(_content(name) + part.encode())) for part in "ab")
                                action = Action(key=key(name), stage="s", target=name, outputs=made, seconds=1.0)
                                with contextlib.suppress(ObjectMissing):  # damaged by another builder meanwhile
                                    store.record(action)
                                out.write(b"made\n")
                            else:
                                out.write(b"found\n")
                        try:
                            for output in action.outputs:
                                data = store.read(output.digest)
                                out.write(b"right\n" if data == _content(name) + output.name.encode() else b"WRONG\n")
                            break
                        except ObjectMissing:
                            out.write(b"again\n")
                    else:
                        out.write(b"LOST\n")
                    luck = chance.random()
                    if luck < 0.02:
                        store.gc(chance.choice([None, 200_000, 1_000_000]), grace=5)
                        out.write(b"collected\n")
                    elif luck < 0.04:
                        store.check(repair=True)
                        out.write(b"checked\n")
                    elif luck < 0.08:
                        folder = chance.choice([Path(root) / "objects", Path(root) / "actions", Path(shared)])
                        with contextlib.suppress(OSError, LookupError, ValueError):
                            victim = chance.choice([path for path in folder.rglob("*") if path.is_file()])
                            data = bytearray(victim.read_bytes())
                            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
                            victim.chmod(0o644)
                            victim.write_bytes(data[: chance.choice([len(data), len(data) // 2])])
                            out.write(b"damaged\n")
                store.flush(5)


def test_under_load(tmp_path: Path) -> None:
    """Builders on shared stores, killed at random and started again: nothing wrong is served, nothing is lost.

    ``NEML2_BUILD_LOAD=16x600`` runs sixteen builders for ten minutes.
    """
    count, seconds = map(int, os.environ.get("NEML2_BUILD_LOAD", "3x4").split("x"))
    context = multiprocessing.get_context("spawn")
    chance = random.Random(7)
    log = tmp_path / "log"

    def start(number: int):
        # Half of them on one local store, the others on one each; all on one shared store.
        root = tmp_path / ("together" if number % 2 else f"alone{number}")
        arguments = (str(root), str(tmp_path / "shared"), chance.randrange(10**9), str(log))
        process = context.Process(target=_builder, args=arguments, daemon=True)
        process.start()
        return process

    end = time.monotonic() + seconds + 1
    running = [start(number) for number in range(count)]
    kills = 0
    while time.monotonic() < end:
        number = chance.randrange(count)
        running[number].join(chance.uniform(0.5, 1.5))
        assert running[number].exitcode is None, "a builder failed"
        running[number].kill()
        running[number].join()
        kills += 1
        running[number] = start(number)
    for process in running:
        process.kill()
        process.join()
    counts = Counter(log.read_text().split())
    counts["killed"] = kills + count
    print(dict(counts))
    assert counts["WRONG"] == counts["LOST"] == 0
    assert counts["right"] > 0
    for root in tmp_path.iterdir():
        if root.is_dir() and root.name != "shared":
            with Store(root) as store:
                store.check(repair=True)
                store.check(repair=True)  # records whose objects went
                assert store.check().ok
                store.gc(grace=0)
                left = [path for path in (root / "tmp").rglob("*") if path.is_file() and store._session is None]
                assert left == []
