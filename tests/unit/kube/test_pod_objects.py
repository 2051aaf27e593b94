"""Pods as users have them, read into model values."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubernetes import client as k8s

from drastate.errors import InvalidPodError
from drastate.kube import pod as pod_module
from drastate.kube.objects import parse_pod, parse_pod_uid
from drastate.model import Container, Pod, PodClaim, RequestRef

YAML = """\
apiVersion: v1
kind: Pod
metadata: {name: p1, namespace: team, uid: 5b6e3f1a-0000-4000-8000-000000000001}
spec:
  resourceClaims:
  - {name: direct, resourceClaimName: c1}
  - {name: made, resourceClaimTemplateName: t1}
  initContainers:
  - {name: setup, resources: {claims: [{name: made}]}}
  containers:
  - {name: main, resources: {claims: [{name: direct, request: gpu}, {name: made}]}}
  - {name: side}
  ephemeralContainers:
  - {name: debug}
status:
  resourceClaimStatuses:
  - {name: made, resourceClaimName: p1-made-x7x2z}
"""

EXPECTED = Pod(
    uid="5b6e3f1a-0000-4000-8000-000000000001",
    namespace="team",
    name="p1",
    claims=(PodClaim("direct", "c1"), PodClaim("made", "p1-made-x7x2z", from_template=True)),
    containers=(
        Container("setup", (RequestRef("made"),)),
        Container("main", (RequestRef("direct", "gpu"), RequestRef("made"))),
        Container("side"),
        Container("debug"),
    ),
)


def make_pod(spec=None, status=None, **metadata):
    return {
        "metadata": {"name": "p1", "uid": "u1", **metadata},
        "spec": spec or {},
        "status": status or {},
    }


def message_of(obj, parse=parse_pod):
    with pytest.raises(InvalidPodError) as caught:
        parse(obj)
    assert "\n" not in caught.value.message
    return caught.value.message


needs_client_31 = pytest.mark.skipif(
    "resource_claim_name" not in k8s.V1PodResourceClaim.attribute_map,
    reason="the client is older than resourceClaimName",
)


def make_v1_pod():
    return k8s.V1Pod(
        metadata=k8s.V1ObjectMeta(name="p1", namespace="team", uid=EXPECTED.uid),
        spec=k8s.V1PodSpec(
            resource_claims=[
                k8s.V1PodResourceClaim(name="direct", resource_claim_name="c1"),
                k8s.V1PodResourceClaim(name="made", resource_claim_template_name="t1"),
            ],
            init_containers=[
                k8s.V1Container(
                    name="setup",
                    resources=k8s.V1ResourceRequirements(
                        claims=[k8s.CoreV1ResourceClaim(name="made")]
                    ),
                )
            ],
            containers=[
                k8s.V1Container(
                    name="main",
                    resources=k8s.V1ResourceRequirements(
                        claims=[
                            k8s.CoreV1ResourceClaim(name="direct", request="gpu"),
                            k8s.CoreV1ResourceClaim(name="made"),
                        ]
                    ),
                ),
                k8s.V1Container(name="side"),
            ],
            ephemeral_containers=[k8s.V1EphemeralContainer(name="debug")],
        ),
        status=k8s.V1PodStatus(
            resource_claim_statuses=[
                k8s.V1PodResourceClaimStatus(name="made", resource_claim_name="p1-made-x7x2z")
            ]
        ),
    )


@pytest.fixture
def warnings(monkeypatch, caplog):
    monkeypatch.setattr(pod_module, "_warnings", type(pod_module._warnings)("drastate.kube.pod"))
    caplog.set_level(logging.WARNING)
    return caplog


# --- the forms a pod comes in ---------------------------------------------------------------------


@needs_client_31
def test_every_form_reads_the_same(tmp_path):
    """YAML, JSON, mapping, file, client object and its JSON all give the same pod."""
    import yaml

    mapping = yaml.safe_load(YAML)
    path = tmp_path / "pod.yaml"
    path.write_text(YAML)
    with k8s.ApiClient() as api:
        sanitized = api.sanitize_for_serialization(make_v1_pod())
    forms = [YAML, json.dumps(mapping), mapping, path, make_v1_pod(), sanitized, EXPECTED]
    assert [parse_pod(form) for form in forms] == [EXPECTED] * len(forms)
    assert {parse_pod_uid(form) for form in forms} == {EXPECTED.uid}


def test_reading_a_pod_loads_no_cluster_client():
    """Client objects are told by their shape, so pods can be read without the client's cost."""
    code = (
        "import sys; from drastate.kube.objects import parse_pod; "
        "parse_pod({'metadata': {'name': 'p', 'uid': 'u'}}); "
        "assert not {'kubernetes', 'urllib3', 'grpc'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_client_object_of_the_api():
    """A pod as the client deserializes it from an answer of the API server is read."""

    class Response:
        data = json.dumps(
            {"metadata": {"name": "p", "uid": "u"}, "spec": {"containers": [{"name": "c"}]}}
        )
        status = 200

        def getheader(self, name, default=None):
            return default

    with k8s.ApiClient() as api:
        try:
            pod = api.deserialize(Response(), "V1Pod")
        except TypeError:  # kubernetes 37 and later
            pod = api.deserialize(Response.data, "V1Pod", "application/json")
    assert parse_pod(pod) == Pod("u", "default", "p", containers=(Container("c"),))


@needs_client_31
def test_to_dict_is_refused():
    """The snake_case dict of a client object is told apart, with the remedy."""
    text = message_of(make_v1_pod().to_dict())
    assert "to_dict()" in text
    assert "pass the object itself" in text
    assert parse_pod_uid(make_v1_pod().to_dict()) == EXPECTED.uid


def test_snake_case_inside_a_mapping_is_refused():
    """A snake_case field that would be overlooked is an error, wherever it is."""
    text = message_of(make_pod(spec={"resource_claims": []}))
    assert "spec.resource_claims should be spec.resourceClaims" in text
    text = message_of(make_pod(status={"extended_resource_claim_status": None}))
    assert "status.extendedResourceClaimStatus" in text


def test_other_client_objects_are_refused():
    """A client object that is no pod is named by its type."""
    assert "V1Node" in message_of(k8s.V1Node(metadata=k8s.V1ObjectMeta(name="n", uid="u")))
    assert "V1Node" in message_of(
        k8s.V1Node(metadata=k8s.V1ObjectMeta(name="n", uid="u")), parse_pod_uid
    )


@pytest.mark.parametrize("obj", [None, 5, [], "p1.yaml", b"{}", object(), Pod, k8s.V1Pod])
def test_what_is_no_pod(obj):
    """Anything else is refused with what would be right."""
    assert "a pod must be a V1Pod" in message_of(obj)


def test_name_of_a_file_as_text():
    """Text that may be the name of a file says how to pass one."""
    assert "pathlib.Path" in message_of("manifests/p1.yaml")


def test_files_that_cannot_be_read(tmp_path):
    """A missing, binary or broken file is named, with the line where there is one."""
    assert "No such file" in message_of(tmp_path / "no.yaml")
    path = tmp_path / "pod.yaml"
    path.write_bytes(b"a: 1\nb: \xff\n")
    assert f"{path}, line 2: not UTF-8" in message_of(path)
    path.write_text("metadata:\n  name: p1\n uid: u1\n")
    assert f"{path}: the pod's text is not valid YAML: line 3: " in message_of(path)
    path.write_text("metadata: {name: p1}\n")
    assert message_of(path).startswith(f"{path}: pod default/p1: metadata.uid is missing")
    assert str(tmp_path) in message_of(Path(tmp_path))


def test_several_documents():
    """The pod is found among other kinds, but two pods are one too many."""
    assert parse_pod(f"kind: ResourceClaim\n---\n{YAML}") == EXPECTED
    assert "found 2 in 2" in message_of(f"{YAML}---\n{YAML}")
    assert "found 0 in 0" in message_of("# nothing\n")


# --- single fields --------------------------------------------------------------------------------


def test_missing_uid_explains_itself():
    """A hand-written pod without UID says what a UID is and how to make one."""
    text = message_of({"metadata": {"name": "p1"}})
    assert "pod default/p1: metadata.uid is missing" in text
    assert "uuidgen" in text


def test_missing_name_and_metadata():
    """What every pod has is asked for by its path."""
    assert "metadata.name is missing" in message_of({"metadata": {"uid": "u"}})
    assert "metadata is missing" in message_of({"spec": {}})


def test_other_kinds():
    """Another kind is named."""
    assert "this is a Service, not a Pod" in message_of({"kind": "Service"})
    assert "apiVersion must be v1" in message_of({**make_pod(), "apiVersion": "apps/v1"})
    assert "Service" in message_of({"kind": "Service", "metadata": {"uid": "u"}}, parse_pod_uid)


@pytest.mark.parametrize(
    ("uid", "part"),
    [
        ("12345678", "the number 12345678: put it in quotes"),
        ("1.0e+10", "the number"),
        ("no", "the boolean false"),
        ("[a]", "a list"),
        ("a b", "must be one word"),
        ('"a\\u0007"', "cannot be printed"),
    ],
)
def test_uids_that_yaml_makes_something_else_of(uid, part):
    """A UID that YAML takes for another type is an error that says to quote it."""
    text = message_of(f"metadata: {{name: p1, uid: {uid}}}\n")
    assert "metadata.uid" in text
    assert part in text


def test_dates_are_text():
    """A name that looks like a date stays what it is, as in Kubernetes' own tools."""
    assert parse_pod("metadata: {name: 2024-01-31, uid: 1e10}\n").name == "2024-01-31"


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        (5, "spec must be a mapping"),
        ({"resourceClaims": {}}, "spec.resourceClaims must be a list"),
        ({"resourceClaims": [5]}, "spec.resourceClaims[0] must be a mapping"),
        ({"resourceClaims": [{"name": 5}]}, "spec.resourceClaims[0].name must be text"),
        ({"resourceClaims": [None]}, "spec.resourceClaims[0].name is missing"),
        (
            {"resourceClaims": [{"name": "a", "resourceClaimName": True}]},
            "spec.resourceClaims[0].resourceClaimName must be text, not the boolean true",
        ),
        ({"containers": "main"}, "spec.containers must be a list, not text ('main')"),
        ({"containers": [{}]}, "spec.containers[0].name is missing"),
        (
            {"initContainers": [{"name": "a", "resources": []}]},
            "spec.initContainers[0].resources must be a mapping, not a list",
        ),
        (
            {"containers": [{"name": "a", "resources": {"claims": [{"name": "x"}]}}]},
            "spec.containers[0].resources.claims[0].name: spec.resourceClaims has no pod claim",
        ),
        (
            {"containers": [{"name": "a", "resources": {"requests": {"x/y": []}}}]},
            "spec.containers[0].resources.requests[x/y] must be a quantity",
        ),
        (
            {"resourceClaims": [{"name": "a"}, {"name": "a"}]},
            'spec.resourceClaims[1].name: there is another pod claim named "a"',
        ),
        (
            {"initContainers": [{"name": "a"}], "containers": [{"name": "a"}]},
            'spec.containers[0].name: there is another container named "a"',
        ),
    ],
)
def test_wrong_fields_are_named_by_path(spec, path):
    """A field of the wrong type, or one that contradicts another, is named by its path."""
    assert f"pod default/p1: {path}" in message_of({**make_pod(), "spec": spec})


def test_null_is_absent():
    """Null lists and mappings read as empty."""
    spec = {"resourceClaims": None, "containers": [{"name": "a", "resources": None}]}
    assert parse_pod({**make_pod(spec), "status": None}).containers == (Container("a"),)


# --- names of claims ------------------------------------------------------------------------------


def test_pod_level_claims_need_no_container():
    """C13: a claim that no container names is a claim of the pod like any other."""
    pod = parse_pod(make_pod({"resourceClaims": [{"name": "n", "resourceClaimName": "c2"}]}))
    assert pod.claims == (PodClaim("n", "c2"),)


def test_null_claim_name_in_status():
    """A null resourceClaimName in the status says that no claim is needed."""
    spec = {"resourceClaims": [{"name": "n", "resourceClaimTemplateName": "t"}]}
    status = {"resourceClaimStatuses": [{"name": "n", "resourceClaimName": None}]}
    [claim] = parse_pod(make_pod(spec, status)).claims
    assert claim == PodClaim("n", None, from_template=True)


@pytest.mark.parametrize(
    "status",
    [
        None,
        {"resourceClaimStatuses": [{"name": "other", "resourceClaimName": "c"}]},
        {"resourceClaimStatuses": [{"name": "n", "resourceClaimName": ""}]},
    ],
)
def test_claim_not_created_yet(status):
    """C10: a template claim that the status does not name is unresolved, and says who makes it."""
    spec = {"resourceClaims": [{"name": "n", "resourceClaimTemplateName": "t"}]}
    [claim] = parse_pod(make_pod(spec, status)).claims
    assert (claim.claim_name, claim.from_template) == (None, True)
    assert "ResourceClaim is not created yet" in claim.unresolved
    assert "kube-controller-manager" in claim.unresolved


def test_pod_claim_without_source():
    """A pod claim that names neither claim nor template is unresolved, with the remedy."""
    [claim] = parse_pod(make_pod({"resourceClaims": [{"name": "n"}]})).claims
    assert "neither resourceClaimName nor resourceClaimTemplateName" in claim.unresolved


def test_pod_claims_of_kubernetes_1_30():
    """Manifests up to Kubernetes 1.30 have the two names one level deeper."""
    spec = {"resourceClaims": [{"name": "n", "source": {"resourceClaimName": "c"}}]}
    assert parse_pod(make_pod(spec)).claims == (PodClaim("n", "c"),)


def test_client_too_old_for_claim_names():
    """A client that dropped the name on reading is told from a pod that has none."""

    class Old:
        attribute_map = MappingProxyType({"name": "name", "source": "source"})
        openapi_types = MappingProxyType({"name": "str", "source": "object"})
        name = "n"
        source = None

    [claim] = parse_pod(make_pod({"resourceClaims": [Old()]})).claims
    assert "use version 31 or later" in claim.unresolved


@pytest.mark.parametrize(
    "spec",
    [{"schedulingGroup": {"podGroupName": "g1"}}, {"workloadRef": {"name": "w", "podGroup": "g1"}}],
)
def test_pod_group(spec):
    """C19: the pod's group is read from both fields that ever named it."""
    assert parse_pod(make_pod(spec)).pod_group == "g1"
    assert parse_pod(make_pod()).pod_group is None


# --- extended resources ---------------------------------------------------------------------------


def extended_pod(*mappings, resources):
    spec = {"containers": [{"name": "main", "resources": resources}, {"name": "side"}]}
    keys = ("containerName", "resourceName", "requestName")
    status = {
        "extendedResourceClaimStatus": {
            "resourceClaimName": "c1",
            "requestMappings": [dict(zip(keys, each, strict=True)) for each in mappings],
        }
    }
    return make_pod(spec, status)


@pytest.mark.parametrize(
    "resources",
    [
        {"requests": {"example.com/gpu": "1"}},
        {"limits": {"example.com/gpu": 2}},
        {"requests": {"example.com/gpu": "0"}, "limits": {"example.com/gpu": "1k"}},
    ],
)
def test_extended_resources(resources, warnings):
    """C18: only the container that has the resource gets the requests that back it."""
    pod = parse_pod(
        extended_pod(
            ("main", "example.com/gpu", "container-0-request-0"),
            ("main", "example.com/gpu", "container-0-request-1"),
            ("main", "example.com/gpu", "container-0-request-0"),
            resources=resources,
        )
    )
    assert pod.extended_claim == "c1"
    assert pod.claims == ()
    main, side = pod.containers
    assert main.extended == ("container-0-request-0", "container-0-request-1")
    assert side.extended == ()
    assert warnings.records == []


@pytest.mark.parametrize("quantity", ["0", 0, "0.0", "0Mi", "0e3", "0E", "-0", 0.0])
def test_extended_resources_of_nothing(quantity, warnings):
    """C18: a mapping for a resource that the container has none of is ignored, with a warning."""
    raw = extended_pod(
        ("main", "example.com/gpu", "r"), resources={"requests": {"example.com/gpu": quantity}}
    )
    for _ in range(3):
        assert parse_pod(raw).containers[0].extended == ()
    [record] = warnings.records
    assert (record.container, record.resource) == ("main", "example.com/gpu")


def test_extended_resources_of_an_unknown_container(warnings):
    """C18: a mapping for a container that does not exist is ignored with one warning."""
    raw = extended_pod(("gone", "example.com/gpu", "r"), resources={})
    parse_pod(raw)
    parse_pod(raw)
    [record] = warnings.records
    assert (record.container, record.pod_uid) == ("gone", "u1")


def test_extended_resources_without_names():
    """A status of extended resources that names no claim is an error."""
    raw = make_pod(status={"extendedResourceClaimStatus": {}})
    assert "status.extendedResourceClaimStatus.resourceClaimName is missing" in message_of(raw)


# --- the UID alone --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "obj",
    [
        "u1",
        " u1 ",
        {"metadata": {"uid": "u1"}},
        {"metadata": {"uid": "u1"}, "spec": None, "status": {}},
        {"metadata": {"uid": "u1"}, "spec": 5, "status": []},
        "metadata: {uid: u1}",
        "metadata:\n  uid: u1\n",
        '{"metadata":{"uid":"u1"}}',
        k8s.V1Pod(metadata=k8s.V1ObjectMeta(uid="u1")),
        Pod("u1", "ns", "n"),
    ],
)
def test_uid_needs_nothing_else(obj):
    """C10: the UID is read whatever has become of the rest of the pod object."""
    assert parse_pod_uid(obj) == "u1"


@pytest.mark.parametrize("obj", ["", "  ", "a b", {}, {"metadata": {"uid": ""}}, None, "\n", "{}"])
def test_no_uid(obj):
    """What holds no UID is an error of its own."""
    message_of(obj, parse_pod_uid)


# --- anything at all ------------------------------------------------------------------------------

FIELDS = st.sampled_from(
    [
        "metadata name namespace uid kind apiVersion spec status resourceClaims source resources",
        "resourceClaimName resourceClaimTemplateName resourceClaimStatuses containers requests",
        "initContainers ephemeralContainers claims request limits schedulingGroup podGroupName",
        "workloadRef podGroup extendedResourceClaimStatus requestMappings containerName",
        "resourceName requestName resource_claims",
    ]
).flatmap(lambda words: st.sampled_from(words.split()))
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
JSON = st.recursive(
    LEAVES | st.just("a"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner, max_size=6),
    max_leaves=30,
)


def check_text(error):
    assert error.message
    assert "\n" not in error.message


@given(JSON)
def test_any_json_is_a_pod_or_an_error(value):
    """Whatever comes, it is a pod or an InvalidPodError, and the UID alone likewise."""
    for parse in (parse_pod, parse_pod_uid):
        try:
            parse(value)
        except InvalidPodError as exc:
            check_text(exc)


@given(spec=JSON, status=JSON)
def test_any_spec_and_status(spec, status):
    """C10: no spec and no status keeps the UID from being read."""
    raw = {"metadata": {"name": "p", "uid": "u"}, "spec": spec, "status": status}
    assert parse_pod_uid(raw) == "u"
    try:
        pod = parse_pod(raw)
    except InvalidPodError:
        return
    assert pod.uid == "u"


@given(st.text(alphabet="ab:{}[]-'\"\n &*!|>%#,?0", max_size=40))
def test_any_text(text):
    """Any text is a pod or an error."""
    for parse in (parse_pod, parse_pod_uid):
        try:
            parse(text)
        except InvalidPodError as exc:
            check_text(exc)
