"""The command example-driver, as a process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from drastate.cli.example_driver import example_driver
from drastate.cli.main import main
from drastate.config import Settings
from drastate.drivers import DriverClient
from drastate.model import ClaimRef, ClaimUID, DriverName
from drastate.testing.driver import node_root

G = DriverName("gpu.example.com")
C1 = ClaimRef(ClaimUID("11111111-1111-4111-8111-111111111111"), "default", "c1")
C2 = ClaimRef(ClaimUID("22222222-2222-4222-8222-222222222222"), "default", "c2")
REPOSITORY = Path(__file__).parents[3]
PROGRAM = "from drastate.cli.example_driver import example_driver as run; run()"

MANIFEST = """
apiVersion: v1
kind: List
items:
- apiVersion: resource.k8s.io/v1
  kind: ResourceClaim
  metadata: {name: c1, namespace: default, uid: 11111111-1111-4111-8111-111111111111}
  status:
    allocation:
      devices:
        results:
        - {driver: gpu.example.com, pool: pool-1, device: gpu-7, request: gpu/big, shareID: s1}
        - {driver: nic.example.com, pool: pool-1, device: nic-0, request: nic}
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: c2, uid: 99999999-9999-4999-8999-999999999999}
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: c3, namespace: default}
"""


@pytest.fixture
def root():
    with node_root() as folder:
        yield folder


@pytest.fixture
def run(root):
    """Starts the command, waits until it is ready."""
    with contextlib.ExitStack() as stack:

        def start(*arguments):
            registry = str(root / "plugins_registry")
            process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, "--plugins-registry", registry, *arguments],
                stdout=subprocess.PIPE,
                text=True,
                cwd=REPOSITORY,
            )
            stack.callback(process.wait)
            stack.callback(process.stdout.close)
            stack.callback(process.kill)
            process.ready_line = process.stdout.readline()
            return process

        yield start


@pytest.fixture
def client(root):
    client = DriverClient(
        root / "plugins_registry", settings=Settings(registry_poll_s=0.03, call_timeout_s=5.0)
    )
    yield client
    client.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_life(root, run, number):
    """It says when it is ready, and a signal ends it with its sockets removed and exit code 0."""
    process = run("--instance", "i1")
    registration = root / "plugins_registry" / "gpu.example.com-i1-reg.sock"
    endpoint = root / "plugins" / "gpu.example.com" / "dra-i1.sock"
    assert process.ready_line == f"ready gpu.example.com {registration} {endpoint}\n"
    assert registration.is_socket()
    process.send_signal(number)
    assert process.wait(timeout=10) == 0
    assert not registration.exists()
    assert not endpoint.exists()


def test_prepares_what_the_manifests_say(root, run, client):
    """With manifests it answers the allocated devices, and an error for a claim that it cannot."""
    (root / "claims").mkdir()
    (root / "claims" / "all.yaml").write_text(MANIFEST)
    run("--manifests", str(root / "claims"), "--cdi-dir", str(root / "cdi"))
    client.start()
    c3 = ClaimRef(ClaimUID("3"), "default", "c3")
    c4 = ClaimRef(ClaimUID("4"), "default", "c4")
    results = client.prepare(G, [C1, C2, c3, c4])
    (device,) = results[C1.uid].devices
    assert (device.pool, device.device, device.share_id) == ("pool-1", "gpu-7", "s1")
    assert device.request_names == ("gpu",)
    (cdi_id,) = device.cdi_device_ids
    (spec,) = (root / "cdi").iterdir()
    assert cdi_id.partition("=")[2] in spec.read_text()
    assert "got replaced" in str(results[C2.uid].error)
    assert "not allocated" in str(results["3"].error)
    assert "not found" in str(results["4"].error)


def test_call_log(root, run, client):
    """Each claim of each call is in the log by the time the call is answered."""
    log = root / "calls.jsonl"
    process = run("--call-log", str(log), "--api-version", "v1beta1")
    client.start()
    assert client.prepare(G, [C1, C2])[C1.uid].error is None
    process.kill()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["method"], line["claim_uid"], line["api"]) for line in lines] == [
        ("NodePrepareResources", C1.uid, "v1beta1"),
        ("NodePrepareResources", C2.uid, "v1beta1"),
    ]
    assert (lines[0]["namespace"], lines[0]["name"]) == ("default", "c1")
    assert lines[0]["time"].endswith("+00:00")


def test_knobs(run, client):
    """Failures are counted down, omitted claims are left out, and the name is as asked for."""
    run("--name", "nic.example.com", "--fail-unprepare", "1", "--omit", "--node-name", "n7")
    client.start()
    nic = DriverName("nic.example.com")
    assert "left the claim out" in str(client.prepare(nic, [C1])[C1.uid].error)
    assert "made to fail" in str(client.unprepare(nic, [C1])[C1.uid].error)
    assert client.unprepare(nic, [C1])[C1.uid].error is None


def test_hanging_driver_can_be_stopped(run, client):
    """A call that hangs does not keep the process from ending."""
    process = run("--hang-prepare", "--fail-prepare", "always")
    client.start()
    assert client.is_registered(G)
    result = DriverClient.prepare
    settings = Settings(registry_poll_s=0.03, call_timeout_s=0.5)
    impatient = DriverClient(client._folder, settings=settings)
    impatient.start()
    assert result(impatient, G, [C1])[C1.uid].answered is False
    impatient.close()
    process.terminate()
    assert process.wait(timeout=10) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["--plugins-registry", "/does/not/exist"],
        ["--plugins-registry", "/tmp", "--name", "Not_A_Name"],
        ["--plugins-registry", "/tmp", "--instance", "a/b"],
        ["--plugins-registry", "/tmp", "--fail-prepare", "sometimes"],
        ["--plugins-registry", "/tmp", "--delay-prepare", "-1"],
        ["--plugins-registry", "/tmp", "--api-version", "v1alpha3"],
        ["--plugins-registry", "/tmp", "--call-log", "/does/not/exist"],
        ["--no-such-option"],
        ["surplus"],
    ],
)
def test_bad_arguments(arguments, capsys):
    """Arguments that cannot be used are told in one line, with exit code 2."""
    assert main(["example-driver", *arguments]) == 2
    said = capsys.readouterr()
    assert (said.out, len(said.err.splitlines())) == ("", 1)


def test_help_has_examples_and_loads_nothing():
    """The help shows examples, and importing the command loads neither grpc nor yaml."""
    result = CliRunner().invoke(example_driver, ["--help"])
    assert result.exit_code == 0
    assert "drastate example-driver --plugins-registry" in result.output
    program = (
        "import sys, drastate.cli.example_driver as m\n"
        "assert not {'grpc', 'yaml', 'drastate.drivers', 'drastate.testing'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=REPOSITORY, env=os.environ)
