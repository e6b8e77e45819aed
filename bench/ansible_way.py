"""The same hosts by Ansible: its venv, what bench/ansible/roll_out.yml is handed, its recap."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common_venv import REQUIREMENTS, pinned_venv
from bench.roll_outs import ROOT, Finished, RerunError, environment, run_timed, tail
from bench.weights import Say
from demo.fleet import DemoHost, Fleet
from edgellm import layout

HERE = Path(__file__).with_name("ansible")
PINNED = REQUIREMENTS / "bench-ansible.txt"
# Debian's names of what deploys/qwen.py sees to on a host of one NUMA node
PACKAGES = ("util-linux", "libgomp1", "libstdc++6")

# Runs in the host: the files, folders and links that a roll-out has placed, as JSON.
_PLACED = """
import grp, json, os, pwd, sys
asked = json.load(sys.stdin)
def owned(path):
    found = os.lstat(path)
    return {"path": path, "owner": pwd.getpwuid(found.st_uid).pw_name,
            "group": grp.getgrgid(found.st_gid).gr_name, "mode": "%04o" % (found.st_mode & 0o7777)}
def file(path):
    with open(path) as opened:
        return dict(owned(path), content=opened.read())
def link(path):
    return {"path": path, "target": os.readlink(path)}
release = [os.path.join(folder, name)
           for folder, _, names in os.walk(asked["release"]) for name in sorted(names)]
links = [os.path.join(asked["release"], name) for name in sorted(os.listdir(asked["release"]))]
print(json.dumps({
    "directories": [owned(path) for path in asked["directories"]],
    "kernel_files": [file(path) for path in asked["kernel_files"] if os.path.exists(path)],
    "release_files": [file(path) for path in release if not os.path.islink(path)],
    "units": [file(path) for path in asked["units"] if os.path.exists(path)],
    "links": [link(path) for path in links + asked["links"] if os.path.islink(path)],
}))
"""


def ansible_python(cache_dir: Path, say: Say) -> Path:
    """-> the python of Ansible's venv. Raises VenvError."""
    venv = cache_dir / "bench" / "ansible"
    return pinned_venv(venv, {PINNED: ("--require-hashes",)}, say, "ansible-core")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsibleWay:
    """`ansible-playbook bench/ansible/roll_out.yml` on the fleet; its own files are in `folder`."""

    python: Path
    fleet: Fleet
    folder: Path

    def prepare(self, releases: dict[str, str], cache_dir: Path) -> dict[str, int]:
        """Hands each host's release, as it lies there, to the playbook.

        -> how many of what it sees to on the first host.
        """
        hosts = {
            host.name: self._connection(host)
            | {"edgellm": self._variables(host, releases[host.name], cache_dir)}
            for host in self.fleet.hosts
        }
        self._inventory.write_text(json.dumps({"all": {"hosts": hosts}}, indent=1))
        first = hosts[self.fleet.hosts[0].name]["edgellm"]
        return {name: len(value) for name, value in first.items() if isinstance(value, list)}

    def run(self) -> Finished:
        env = environment(
            ANSIBLE_CONFIG=str(HERE / "ansible.cfg"),
            ANSIBLE_HOME=str(self.folder / "home"),
            ANSIBLE_SSH_CONTROL_PATH_DIR=str(self.folder / "cp"),
        )
        program = str(self.python.with_name("ansible-playbook"))
        return run_timed(
            [program, "-i", str(self._inventory), str(HERE / "roll_out.yml")],
            cwd=HERE,
            env=env,
            log=self.folder / "ansible.log",
        )

    def run_unchanged(self) -> Finished:
        """All hosts reached, nothing failed, nothing changed. Else RerunError."""
        done = self.run()
        hosts = recap(done.output)
        wanted = {host.name for host in self.fleet.hosts}
        bad = {name: counts for name, counts in hosts.items() if not is_unchanged(counts)}
        if done.exit_code != 0 or hosts.keys() != wanted or bad:
            raise RerunError(f"Ansible: exit {done.exit_code}, {bad}\n{tail(done.output, 60)}")
        return done

    @property
    def _inventory(self) -> Path:
        return self.folder / "ansible.json"

    def _connection(self, host: DemoHost) -> dict[str, Any]:
        known_hosts = shlex.quote(f"UserKnownHostsFile={self.fleet.known_hosts}")
        return {
            "ansible_host": host.address,
            "ansible_port": host.ssh_port,
            "ansible_user": ROOT,
            "ansible_ssh_private_key_file": str(self.fleet.private_key),
            "ansible_ssh_common_args": f"-F none -o {known_hosts} -o IdentitiesOnly=yes",
        }

    def _variables(self, host: DemoHost, release_id: str, cache_dir: Path) -> dict[str, Any]:
        asked = {
            "release": layout.release_directory(release_id),
            "directories": [
                *(layout.INSTALL_DIR, layout.MODELS, layout.RUNTIMES, layout.RELEASES),
                layout.release_directory(release_id),
            ],
            "kernel_files": [layout.SYSCTL_CONF, layout.LIMITS_CONF],
            "units": [f"{layout.UNIT_DIR}/{unit}" for unit in layout.UNITS],
            "links": [layout.CURRENT],
        }
        said = self.fleet.exec(host, "python3", "-c", _PLACED, input=json.dumps(asked)).stdout
        placed = json.loads(said)
        for kind in ("kernel_files", "release_files", "units"):
            for file in placed[kind]:
                local = self.folder / "placed" / host.name / file["path"].lstrip("/")
                local.parent.mkdir(parents=True, exist_ok=True)
                local.write_text(file.pop("content"))
                file["src"] = str(local)
        targets = {link["path"].rpartition("/")[2]: link["target"] for link in placed["links"]}
        runtime_id = targets["runtime"].rpartition("/")[2]
        runtime = layout.runtime_directory(runtime_id)
        model_sha256 = targets["model.gguf"].rpartition("/")[2].removesuffix(".gguf")
        digest = (HERE / "files" / "tree_digest.py").read_text()
        tree = self.fleet.exec(host, "python3", "-", runtime, input=digest).stdout.strip()
        swappiness = self.fleet.exec(host, "sysctl", "-n", "vm.swappiness").stdout.strip()
        return {
            **placed,
            "release_id": release_id,
            "keep_releases": 2,
            "packages": list(PACKAGES),
            "swappiness": int(swappiness),
            "model": {
                "path": layout.model_path(model_sha256),
                "sha256": model_sha256,
                "source": str(cache_dir / "models" / f"{model_sha256}.gguf"),
            },
            "runtime": {
                "directory": runtime,
                "digest": tree,
                "archive": str(cache_dir / "runtimes" / f"{runtime_id}.tar.gz"),
            },
        }


def recap(output: str) -> dict[str, dict[str, int]]:
    """'edge-1 : ok=20 changed=0 unreachable=0 …' of PLAY RECAP -> host: {"ok": 20, …}."""
    _, _, after = output.partition("PLAY RECAP")
    found = re.findall(r"^(\S+)\s+: ((?:\w+=\d+\s*)+)$", after, re.MULTILINE)
    return {
        host: {name: int(n) for name, n in re.findall(r"(\w+)=(\d+)", counts)}
        for host, counts in found
    }


def is_unchanged(counts: dict[str, int]) -> bool:
    """Some tasks were done, and none changed, failed, or was saved by a rescue."""
    faults = ("changed", "unreachable", "failed", "rescued", "ignored")
    return counts.get("ok", 0) > 0 and all(counts.get(name) == 0 for name in faults)
