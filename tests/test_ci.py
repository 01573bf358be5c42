"""The ready-made CI files, played out: their own shell lines, in fresh checkouts on machines with empty homes.

The two actions that GitHub provides are played by `Hosted`: entries that cannot be changed, an exact key, then prefixes;
entries of a pull request are its own.
"""

from __future__ import annotations

import dataclasses
import getpass
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import INPUT, ROOT, digests

yaml = pytest.importorskip("yaml", reason="PyYAML, to read the CI files, is not installed")

EXAMPLES = ROOT / "examples" / "ci"
MANIFEST = '[[model]]\ninput = "a.i"\nmodel = "eq"\n[[model]]\ninput = "a.i"\nmodel = "other"\n'


@dataclasses.dataclass
class Hosted:
    """GitHub's cache of one repository: scope → key → contents."""

    entries: dict[str, dict[str, bytes]] = dataclasses.field(default_factory=dict)

    def restore(self, scopes: list[str], key: str, prefixes: list[str]) -> tuple[str, bytes] | None:
        for wanted in (key, *prefixes):
            for scope in scopes:
                for name, data in reversed(self.entries.get(scope, {}).items()):
                    if name == wanted or (wanted in prefixes and name.startswith(wanted)):
                        return name, data
        return None

    def save(self, scope: str, key: str, data: bytes) -> None:
        self.entries.setdefault(scope, {}).setdefault(key, data)


@dataclasses.dataclass
class Machine:
    """A fresh runner: an empty home, another user, a checkout of the project in a folder of its own."""

    checkout: Path
    environ: dict[str, str]
    outputs: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)

    @property
    def log(self) -> list[str]:
        """Calls of the fake compiler."""
        path = Path(self.environ["NEML2_BUILD_FAKE_LOG"])
        return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []

    def shell(self, script: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script],
            cwd=self.checkout,
            env={**self.environ, **more},
            capture_output=True,
            text=True,
            timeout=900,
        )

    def tree(self) -> dict[str, str]:
        return digests(self.checkout / "aoti")


@pytest.fixture
def machine(tmp_path: Path) -> Callable[..., Machine]:
    count = itertools.count(1)

    def make(fake: bool = True, manifest: str = MANIFEST, **files: str) -> Machine:
        number = next(count)
        top = tmp_path / f"runner{number}" / ("work" * number)
        for folder in ("home", "temp", "bin", "checkout"):
            (top / folder).mkdir(parents=True)
        command = top / "bin" / "neml2-build"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m neml2_build.cli "$@"\n')
        command.chmod(0o755)
        (top / "bin" / "python").symlink_to(sys.executable)
        checkout = top / "checkout"
        for name, text in {"a.i": INPUT, "neml2-build.toml": manifest, **files}.items():
            (checkout / name).write_text(text)
        environ = {
            "PATH": f"{top / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HOME": str(top / "home"),
            "USER": f"runner{number}",
            "LOGNAME": f"runner{number}",
            "TMPDIR": str(top / "temp"),
            "RUNNER_TEMP": str(top / "temp"),
            "NEML2_BUILD_FAKE_LOG": str(top / "log"),
            **({"NEML2_BUILD_COMPILER": "fake"} if fake else {}),
        }
        return Machine(checkout, environ)

    return make


def act(machine: Machine, hosted: Hosted, event: str, ref: str, **inputs: str) -> dict[str, str]:
    """Run the composite action on *machine* as GitHub would: its outputs."""
    action = yaml.safe_load((EXAMPLES / "github" / "action.yml").read_text())
    values = {f"inputs.{name}": inputs.get(name, about["default"]) for name, about in action["inputs"].items()}
    values |= {
        "github.event_name": event,
        "github.ref": ref,
        "github.event.repository.default_branch": "main",
        "runner.temp": machine.environ["RUNNER_TEMP"],
    }

    def fill(text: Any) -> str:
        return re.sub(r"\$\{\{ *(.*?) *\}\}", lambda found: values[found[1]], str(text))

    def holds(condition: str) -> bool:
        words = re.fullmatch(r"(\S+) == 'true' && (\S+) != 'true'", condition)
        assert words is not None, condition
        return values[words[1]] == "true" and values[words[2]] != "true"

    scopes = ["refs/heads/main"] if ref == "refs/heads/main" else [ref, "refs/heads/main"]
    for step in action["runs"]["steps"]:
        if "if" in step and not holds(step["if"]):
            continue
        outputs: dict[str, str] = {}
        if "run" in step:
            file = Path(machine.environ["RUNNER_TEMP"]) / f"output-{step['id']}"
            file.touch()
            environ = {name: fill(value) for name, value in step.get("env", {}).items()}
            done = machine.shell(step["run"], GITHUB_OUTPUT=str(file), **environ)
            assert done.returncode == 0, (step["id"], done.stdout, done.stderr)
            for name, block, line in re.findall(r"^(\w+)(?:<<END\n((?:.*\n)*?)END|=(.*))$", file.read_text(), re.MULTILINE):
                outputs[name] = (block or line).rstrip("\n")
        elif step["uses"].startswith("actions/cache/restore@"):
            fields = {name: fill(value) for name, value in step["with"].items()}
            found = hosted.restore(scopes, fields["key"], fields["restore-keys"].split())
            outputs["cache-hit"] = str(found is not None and found[0] == fields["key"]).lower()
            if found is not None:
                Path(fields["path"]).write_bytes(found[1])
        elif step["uses"].startswith("actions/cache/save@"):
            fields = {name: fill(value) for name, value in step["with"].items()}
            hosted.save(scopes[0], fields["key"], Path(fields["path"]).read_bytes())
        else:
            raise AssertionError(f"no player for {step['uses']}")
        values |= {f"steps.{step['id']}.outputs.{name}": value for name, value in outputs.items()}
    return {name: fill(about["value"]) for name, about in action["outputs"].items()}


MAIN = {"event": "push", "ref": "refs/heads/main"}
PULL = {"event": "pull_request", "ref": "refs/pull/7/merge"}


class TestGitHub:
    def test_two_machines(self, machine: Callable[..., Machine]) -> None:
        hosted = Hosted()
        one, two = machine(), machine()
        assert one.environ["USER"] != two.environ["USER"] != getpass.getuser()
        assert act(one, hosted, **MAIN) == {"lowered": "3"}
        assert sorted(set(one.log)) == ["export", "lower"]
        assert act(two, hosted, **MAIN) == {"lowered": "0"}
        assert two.log == []
        assert two.tree() == one.tree() != {}
        (entries,) = hosted.entries.values()
        assert len(entries) == 1

    def test_an_edit_restores_the_rest_and_is_saved(self, machine: Callable[..., Machine]) -> None:
        hosted = Hosted()
        act(machine(), hosted, **MAIN)
        edited = {"a.i": INPUT.replace("factor = 1.5", "factor = 7.5")}
        assert act(machine(**edited), hosted, **MAIN) == {"lowered": "1"}
        assert len(hosted.entries["refs/heads/main"]) == 2
        assert act(machine(**edited), hosted, **MAIN) == {"lowered": "0"}

    @pytest.mark.parametrize("event", ["pull_request", "pull_request_target"])
    def test_a_strangers_pull_request_reads_and_cannot_write(self, machine: Callable[..., Machine], event: str) -> None:
        hosted = Hosted()
        act(machine(), hosted, **MAIN)
        before = {scope: dict(entries) for scope, entries in hosted.entries.items()}
        edited = {"a.i": INPUT.replace("factor = 1.5", "factor = 7.5")}
        ref = PULL["ref"] if event == "pull_request" else "refs/heads/main"
        stranger = machine(**edited)
        assert act(stranger, hosted, event, ref) == {"lowered": "1"}
        assert hosted.entries == before

    def test_a_branch_does_not_save_unless_asked(self, machine: Callable[..., Machine]) -> None:
        hosted = Hosted()
        act(machine(), hosted, "push", "refs/heads/feature")
        assert hosted.entries == {}
        act(machine(), hosted, "push", "refs/heads/feature", save="true")
        assert list(hosted.entries) == ["refs/heads/feature"]
        act(machine(), hosted, "push", "refs/heads/main", save="false")
        assert list(hosted.entries) == ["refs/heads/feature"]

    def test_a_broken_pack_costs_a_warning(self, machine: Callable[..., Machine]) -> None:
        hosted = Hosted()
        act(machine(), hosted, **MAIN)
        entries = hosted.entries["refs/heads/main"]
        for key in entries:
            entries[key] = entries[key][:-700]
        assert act(machine(), hosted, **MAIN) == {"lowered": "3"}

    def test_some_targets(self, machine: Callable[..., Machine]) -> None:
        hosted = Hosted()
        assert act(machine(), hosted, **MAIN, targets="other") == {"lowered": "1"}
        assert act(machine(), hosted, **MAIN, targets="other") == {"lowered": "0"}

    def test_workflows_give_secrets_to_pushes_only(self) -> None:
        for name in ("workflow.yml", "workflow-remote.yml"):
            workflow = yaml.safe_load((EXAMPLES / "github" / name).read_text())
            assert workflow["permissions"] == {"contents": "read"}
            for job in workflow["jobs"].values():
                for step in job["steps"]:
                    if "secrets." in str(step):
                        assert step["if"] == "github.event_name == 'push'"
        assert set(workflow[True]) == {"push", "pull_request"}


class TestGitLab:
    def test_two_machines(self, machine: Callable[..., Machine], tmp_path: Path) -> None:
        template = yaml.safe_load((EXAMPLES / "gitlab" / "neml2-build.gitlab-ci.yml").read_text())[".neml2-build"]
        (cache,) = template["cache"]
        saving, reading = template["rules"]
        assert "default" not in str(reading) and cache["policy"] == "$NEML2_BUILD_CACHE_POLICY"
        kept = tmp_path / "kept.pack"

        def job(runner: Machine, policy: str) -> None:
            pack = runner.checkout / ".neml2-build.pack"
            if kept.exists() and policy.startswith("pull"):
                shutil.copy(kept, pack)
            lines = [line for line in template["script"] if not line.startswith("pip ")]
            assert len(lines) == 3
            done = runner.shell("\n".join(lines), NEML2_BUILD_PACK=str(pack), NEML2_BUILD_CACHE_POLICY=policy)
            assert done.returncode == 0, done.stderr
            if policy == "pull-push":
                shutil.copy(pack, kept)

        one, two, stranger = machine(), machine(), machine(**{"a.i": INPUT.replace("factor = 1.5", "factor = 7.5")})
        job(one, saving["variables"]["NEML2_BUILD_CACHE_POLICY"])
        assert len(one.log) == 5
        saved = kept.read_bytes()
        job(stranger, template["variables"]["NEML2_BUILD_CACHE_POLICY"])
        assert stranger.log == ["export", "lower"] and kept.read_bytes() == saved
        job(two, template["variables"]["NEML2_BUILD_CACHE_POLICY"])
        assert two.log == [] and two.tree() == one.tree()


class TestSharedStore:
    """The remote variant: everybody reads one store, and a stranger who can even write to it is not believed."""

    def test_a_strangers_code_is_refused_and_made_again(self, machine: Callable[..., Machine], tmp_path: Path) -> None:
        pytest.importorskip("cryptography", reason="signatures need the package cryptography")
        keygen = machine()
        public = keygen.shell("neml2-build cache keygen key").stdout.strip()
        secret = (keygen.checkout / "key").read_text()
        shared = tmp_path / "shared"
        manifest = f'remote = "{shared}"\ntrusted-keys = ["{public}"]\n{MANIFEST}'
        write = {"NEML2_BUILD_REMOTE_WRITE": "1"}

        # A stranger gets hold of the server's password, takes the trusted keys out of the manifest, and fills the store.
        stranger = machine(manifest=f'remote = "{shared}"\n{MANIFEST}')
        assert stranger.shell("neml2-build", **write).returncode == 0
        planted = digests(shared)
        assert planted
        one = machine(manifest=manifest)
        done = one.shell("neml2-build --json")
        assert json.loads(done.stdout)["graphs"] == {"lowered": 3, "reused": 0}, done.stderr
        assert "remote-unsigned" in done.stderr
        assert digests(shared) == planted, "a reader does not write"

        # A push to the default branch, which has the key.
        two = machine(manifest=manifest)
        done = two.shell("neml2-build --json", NEML2_BUILD_SIGNING_KEY=secret, **write)
        assert json.loads(done.stdout)["graphs"]["lowered"] == 3, done.stderr
        three = machine(manifest=manifest)
        done = three.shell("neml2-build --json")
        assert json.loads(done.stdout)["graphs"] == {"lowered": 0, "reused": 3}, done.stderr
        assert three.log == [] and three.tree() == two.tree() == one.tree()

        # A pull request that has the manifest and no key: it reads, and what it would write is not sent.
        before = digests(shared)
        pull = machine(manifest=manifest, **{"a.i": INPUT.replace("factor = 1.5", "factor = 7.5")})
        done = pull.shell("neml2-build --json", **write)
        assert json.loads(done.stdout)["graphs"]["lowered"] == 1
        assert "remote-write-off" in done.stderr and digests(shared) == before

    def test_a_pack_of_a_stranger_is_refused(self, machine: Callable[..., Machine], tmp_path: Path) -> None:
        pytest.importorskip("cryptography", reason="signatures need the package cryptography")
        stranger = machine()
        assert stranger.shell(f"neml2-build && neml2-build cache pack {tmp_path}/x.pack").returncode == 0
        public = machine().shell("neml2-build cache keygen key").stdout.strip()
        reader = machine(manifest=f'trusted-keys = ["{public}"]\n{MANIFEST}')
        done = reader.shell(f"neml2-build cache unpack --json {tmp_path}/x.pack")
        found = json.loads(done.stdout)
        assert found["actions"] == 0 and {one["kind"] for one in found["refused"]} == {"remote-unsigned"}
        done = reader.shell("neml2-build --json")
        assert json.loads(done.stdout)["graphs"]["lowered"] == 3


@pytest.mark.real
def test_two_machines_with_the_real_compiler(machine: Callable[..., Machine]) -> None:
    """The target ``rates``: bytes packed, seconds and compiles are printed (``-s``)."""
    text = (ROOT / "models" / "rates.i").read_text()
    manifest = '[[model]]\ninput = "rates.i"\nmodel = "eq"\nname = "rates"\n'
    hosted = Hosted()
    one, two = (machine(fake=False, manifest=manifest, **{"rates.i": text}) for _ in range(2))
    assert act(one, hosted, **MAIN) == {"lowered": "1"}
    first = json.loads((Path(one.environ["RUNNER_TEMP"]) / "neml2-build.json").read_text())
    assert act(two, hosted, **MAIN) == {"lowered": "0"}
    second = json.loads((Path(two.environ["RUNNER_TEMP"]) / "neml2-build.json").read_text())
    assert second["targets"]["restored"] == 1 and not second["torch_imported"]
    assert two.tree() == one.tree() and len(two.tree()) == 3
    (pack,) = hosted.entries["refs/heads/main"].values()
    print(
        f"packed {len(pack)} bytes; machine one {first['seconds']} s, 3 compiles; machine two {second['seconds']} s, 0 compiles"
    )
