"""Claims from an API server: a small real one, through the real client."""

from __future__ import annotations

import http.server
import json
import socket
import threading
import time
import types

import pytest
from kubernetes import client as k8s

from drastate.errors import (
    ClaimNotFoundError,
    ClusterForbiddenError,
    ClusterUnavailableError,
    InvalidClaimError,
    UsageError,
)
from drastate.kube.client import ClusterClaims

GROUP = "/apis/resource.k8s.io"
TOKEN = "secret-token-7"


def group_of(*versions):
    return {
        "kind": "APIGroup",
        "name": "resource.k8s.io",
        "versions": [{"groupVersion": f"resource.k8s.io/{v}", "version": v} for v in versions],
    }


def claim_object(name="c1", version="v1", **more):
    return {
        "apiVersion": f"resource.k8s.io/{version}",
        "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": "ns", "uid": f"uid-{name}"},
        "status": {"futureField": [1]},
        **more,
    }


def status_object(code, reason, message="", **details):
    return {
        "kind": "Status",
        "status": "Failure",
        "code": code,
        "reason": reason,
        "message": message,
        "details": details,
    }


def claim_path(version="v1", name="c1"):
    return f"{GROUP}/{version}/namespaces/ns/resourceclaims/{name}"


class Server:
    """An HTTP server; tests set its answers by path: (status, body, headers), or a function."""

    def __init__(self):
        self.answers = {}
        self.requests = []
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                server.requests.append((self.path, dict(self.headers)))
                answer = server.answers.get(self.path, (404, "404 page not found"))
                if callable(answer):
                    answer = answer(self)
                    if answer is None:
                        self.close_connection = True
                        return
                status, body, *headers = answer
                data = body if isinstance(body, bytes) else body.encode()
                lines = [f"HTTP/1.1 {status} x", f"Content-Length: {len(data)}"]
                lines += [f"{key}: {value}" for each in headers for key, value in each.items()]
                self.wfile.write("\r\n".join([*lines, "", ""]).encode() + data)

            def log_message(self, *args):
                pass

        self.httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.httpd.daemon_threads = True
        self.httpd.handle_error = lambda *_: None  # clients that hang up are part of the tests
        self.httpd.block_on_close = False
        self.thread = threading.Thread(target=self.httpd.serve_forever, args=(0.01,))
        self.thread.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.httpd.server_port}"

    @property
    def paths(self):
        return [path for path, _ in self.requests]

    def serve(self, *versions, claims=("c1",)):
        self.answers[GROUP] = (200, json.dumps(group_of(*versions)))
        for version in versions:
            for name in claims:
                answer = (200, json.dumps(claim_object(name, version)))
                self.answers[claim_path(version, name)] = answer

    def close(self):
        self.httpd.shutdown()
        self.httpd.server_close()
        self.thread.join()


@pytest.fixture
def server():
    server = Server()
    yield server
    server.close()


@pytest.fixture
def make_api():
    made = []

    def make(url, token=TOKEN):
        configuration = k8s.Configuration()
        configuration.host = url
        # The name of the key changed in version 36 of the client.
        configuration.api_key = {
            "authorization": f"Bearer {token}",
            "BearerToken": f"Bearer {token}",
        }
        api = k8s.ApiClient(configuration)
        made.append(api)
        return api

    yield make
    for api in made:
        api.rest_client.pool_manager.clear()
        api.close()


@pytest.fixture
def api(server, make_api):
    return make_api(server.url)


@pytest.fixture
def claims(api):
    return ClusterClaims(api, connect_timeout_s=1.0, read_timeout_s=0.5)


def get_error(claims, kind, name="c1"):
    with pytest.raises(kind) as caught:
        claims.get_claim("ns", name)
    text = str(caught.value)
    assert "ns/" in text
    assert TOKEN not in text
    return caught.value


# --- what works -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("served", "used"),
    [
        (("v1",), "v1"),
        (("v1beta1",), "v1beta1"),
        (("v1beta1", "v1beta2"), "v1beta2"),
        (("v1alpha3", "v2", "v1beta1", "v1", "v1beta2"), "v1"),
    ],
)
def test_best_version_is_used(server, claims, served, used):
    """The best API version that both sides know is used, and the server is asked for it once."""
    server.serve(*served)
    for _ in range(2):
        assert claims.get_claim("ns", "c1").ref.uid == "uid-c1"
    assert server.paths == [GROUP, claim_path(used), claim_path(used)]


def test_request_carries_credentials(server, claims):
    """Requests carry the client's own credentials and ask for JSON."""
    server.serve("v1")
    claims.get_claim("ns", "c1")
    for _, headers in server.requests:
        lower = {key.lower(): value for key, value in headers.items()}
        assert lower["authorization"] == f"Bearer {TOKEN}"
        assert lower["accept"] == "application/json"


def test_path_in_front_of_the_api(server, make_api):
    """An API server behind a path, as management consoles have it, is reached there."""
    server.serve("v1")
    server.answers = {f"/k8s/clusters/c-1{path}": each for path, each in server.answers.items()}
    claims = ClusterClaims(make_api(f"{server.url}/k8s/clusters/c-1"))
    assert claims.get_claim("ns", "c1").ref.name == "c1"


def test_api_objects_are_taken(server, api):
    """An API object stands for its client."""
    server.serve("v1")
    assert ClusterClaims(k8s.CoreV1Api(api)).get_claim("ns", "c1").ref.name == "c1"
    with pytest.raises(UsageError, match="ApiClient"):
        ClusterClaims(object())


def test_threads_share_a_source(server, claims):
    """Many threads can ask at once."""
    names = [f"c{number}" for number in range(20)]
    server.serve("v1", claims=names)
    found = []
    threads = [
        threading.Thread(
            target=lambda name=name: found.append(claims.get_claim("ns", name).ref.name)
        )
        for name in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted(names)


def test_connection_that_was_closed_meanwhile(server, claims):
    """A kept connection that the server dropped is replaced without an error."""
    server.serve("v1")
    good = server.answers[claim_path()]
    calls = []

    def drop_first(handler):
        calls.append(handler.path)
        return None if len(calls) == 1 else good

    server.answers[claim_path()] = drop_first
    assert claims.get_claim("ns", "c1").ref.name == "c1"
    assert len(calls) == 2


# --- not found ------------------------------------------------------------------------------------


def test_claim_not_found(server, claims):
    """A claim that the server does not have is told from a version that it does not have."""
    server.serve("v1", claims=())
    server.answers[claim_path()] = (
        404,
        json.dumps(status_object(404, "NotFound", name="c1", kind="resourceclaims")),
    )
    error = get_error(claims, ClaimNotFoundError)
    assert error.can_retry
    assert server.paths == [GROUP, claim_path()]


def test_sparse_not_found(server, claims):
    """A 404 that does not say what is missing is checked against the list of versions."""
    server.serve("v1", claims=())
    get_error(claims, ClaimNotFoundError)
    assert server.paths == [GROUP, claim_path(), GROUP]


def test_upgrade_changes_the_version(server, claims):
    """When the version in use is gone after an upgrade, the new one is used at once."""
    server.serve("v1beta1")
    claims.get_claim("ns", "c1")
    server.answers.clear()
    server.serve("v1")
    assert claims.get_claim("ns", "c1").ref.name == "c1"
    assert server.paths[2:] == [claim_path("v1beta1"), GROUP, claim_path("v1")]


@pytest.mark.parametrize("served", [None, (), ("v1alpha2",)])
def test_api_group_that_is_not_served(server, claims, served):
    """A server without any version that is known here is unavailable, with the remedy."""
    if served is not None:
        server.serve(*served)
    error = get_error(claims, ClusterUnavailableError)
    assert "enable DynamicResourceAllocation" in str(error)


# --- refused --------------------------------------------------------------------------------------


def test_forbidden(server, claims):
    """C12: a 403 names verb, resource, namespace and the server's own words."""
    server.serve("v1")
    words = 'User "system:node:n1" cannot get resource'
    server.answers[claim_path()] = (403, json.dumps(status_object(403, "Forbidden", words)))
    text = str(get_error(claims, ClusterForbiddenError))
    for part in ('"get"', "resourceclaims.resource.k8s.io", "namespace ns", "Role", words):
        assert part in text


def test_forbidden_discovery(server, claims):
    """A 403 on the list of versions names that path and the role that allows it."""
    server.answers[GROUP] = (403, "no")
    text = str(get_error(claims, ClusterForbiddenError))
    assert GROUP in text
    assert "system:discovery" in text


def test_unauthorized(server, claims):
    """C111: a 401 says that the credentials are the trouble."""
    server.serve("v1")
    server.answers[claim_path()] = (401, "Unauthorized")
    assert "renew" in str(get_error(claims, ClusterForbiddenError))


def test_rotated_token(server, make_api):
    """C111: after a 401 new credentials are made once, and the call succeeds."""
    server.serve("v1")
    good = server.answers[claim_path()]

    def check(handler):
        is_new = handler.headers["authorization"] == "Bearer new"
        return good if is_new else (401, "Unauthorized")

    server.answers[claim_path()] = check
    renewals = []

    def renew():
        renewals.append(1)
        return make_api(server.url, "new")

    claims = ClusterClaims(make_api(server.url, "old"), renew=renew)
    for _ in range(3):
        assert claims.get_claim("ns", "c1").ref.name == "c1"
    assert renewals == [1]
    assert server.paths.count(claim_path()) == 4


def test_renewal_that_does_not_help(server, make_api):
    """C111: new credentials that fail, or are refused as well, are an error and no loop."""
    server.serve("v1")
    server.answers[claim_path()] = (401, "Unauthorized")
    claims = ClusterClaims(make_api(server.url), renew=lambda: make_api(server.url))
    get_error(claims, ClusterForbiddenError)
    assert server.paths.count(claim_path()) == 2

    def fail():
        raise FileNotFoundError(2, "No such file or directory")

    claims = ClusterClaims(make_api(server.url), renew=fail)
    error = get_error(claims, ClusterUnavailableError)
    assert isinstance(error.__cause__, FileNotFoundError)


# --- in trouble -----------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [429, 500, 503, 504, 302, 400])
def test_server_in_trouble(server, claims, status):
    """C113: an error of the server is no answer about the claim."""
    server.serve("v1")
    server.answers[claim_path()] = (status, "{}", {"Location": claim_path(name="c2")})
    error = get_error(claims, ClusterUnavailableError)
    assert f"HTTP {status}" in str(error)
    assert error.can_retry
    assert server.paths.count(claim_path()) == 1


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_is_not_waited_for(server, claims, status):
    """A server that asks to wait an hour does not hold a pod for an hour."""
    server.serve("v1")
    server.answers[claim_path()] = (status, "{}", {"Retry-After": "3600"})
    start = time.monotonic()
    get_error(claims, ClusterUnavailableError)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    "body",
    [
        "",
        "<html>login</html>",
        b"\xff\xfe",
        "[]",
        "null",
        "[" * 100_000,
        '{"kind": "Status"}',
        json.dumps(claim_object("c2")),
        json.dumps({"kind": "ResourceClaim"}),
        json.dumps({"kind": "ResourceClaim", "metadata": {"name": "c1", "namespace": "ns"}}),
    ],
)
def test_answers_that_make_no_sense(server, claims, body):
    """C113: an answer that is no claim, or another one, is no answer."""
    server.serve("v1")
    server.answers[claim_path()] = (200, body)
    get_error(claims, ClusterUnavailableError)
    server.answers[GROUP] = (200, body)
    get_error(ClusterClaims(claims._api), ClusterUnavailableError)


def test_incomplete_claim(server, claims):
    """A claim that lacks a field every claim has is an error of the claim."""
    server.serve("v1")
    raw = claim_object(status={"allocation": {"devices": {"results": [{}]}}})
    server.answers[claim_path()] = (200, json.dumps(raw))
    error = get_error(claims, InvalidClaimError)
    assert error.claim_uid == "uid-c1"


def test_server_that_is_down(make_api):
    """A refused connection says so, and keeps its cause."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        error = get_error(ClusterClaims(make_api(url)), ClusterUnavailableError)
    assert "Connection refused" in str(error)
    assert error.__cause__ is not None


def test_server_without_a_name(make_api):
    """A name that does not resolve says so."""
    error = get_error(ClusterClaims(make_api("http://nowhere.invalid")), ClusterUnavailableError)
    assert "cannot be resolved" in str(error)


def test_server_that_hangs(server, claims):
    """C110: a server that accepts and says nothing is given up within the time limits."""
    server.serve("v1")
    release = threading.Event()

    def hang(_handler):
        release.wait(20)

    server.answers[claim_path()] = hang
    start = time.monotonic()
    error = get_error(claims, ClusterUnavailableError)
    release.set()
    assert time.monotonic() - start < 5
    assert "no answer in time" in str(error)


def test_server_that_stops_in_the_middle(server, claims):
    """An answer that breaks off is no answer."""
    server.serve("v1")

    def cut(handler):
        handler.wfile.write(b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"kind"')

    server.answers[claim_path()] = cut
    get_error(claims, ClusterUnavailableError)


def test_answer_that_never_ends(server, claims, monkeypatch):
    """An answer over the limit is given up."""
    from drastate.kube import rest

    monkeypatch.setattr(rest, "_BODY_MAX_BYTES", 1000)
    server.serve("v1")
    server.answers[claim_path()] = (200, " " * 200_000)
    get_error(claims, ClusterUnavailableError)


def test_no_tls(server, make_api):
    """A server that speaks no TLS says that TLS is the trouble."""
    api = make_api(server.url.replace("http:", "https:"))
    error = get_error(ClusterClaims(api, read_timeout_s=0.5), ClusterUnavailableError)
    assert "TLS failed" in str(error) or "no answer in time" in str(error)


def test_token_with_a_line_break_is_not_quoted(server, make_api):
    """A token that is no valid header is not told to anybody, not even in the chain of causes."""
    import traceback

    error = get_error(ClusterClaims(make_api(server.url, f"{TOKEN}\n")), ClusterUnavailableError)
    assert "line break" in str(error)
    assert TOKEN not in "".join(traceback.format_exception(error))


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("namespace", "name"),
    [
        ("ns", "../../../../api/v1/namespaces/ns/secrets/s"),
        ("ns", "c1?x=1"),
        ("ns", "c1/status"),
        ("ns", ""),
        ("ns", "C1"),
        ("ns", "c1\n"),
        ("ns", "x" * 254),
        ("a.b", "c1"),
        ("..", "c1"),
        ("", "c1"),
        ("x" * 64, "c1"),
    ],
)
def test_names_cannot_change_the_path(server, claims, namespace, name):
    """A name that Kubernetes does not allow never reaches the server."""
    with pytest.raises(UsageError, match="none that Kubernetes allows"):
        claims.get_claim(namespace, name)
    assert server.requests == []


# --- clients of other makes -----------------------------------------------------------------------


def test_clients_up_to_36(server):
    """A client with the call of versions up to 36, and nothing else, is enough."""
    server.serve("v1")
    calls = []

    class ApiError(Exception):
        def __init__(self, status, body):
            self.status, self.body = status, body

    class Old:
        def call_api(self, resource_path, method, **options):
            calls.append((resource_path, method, options))
            status, body = server.answers.get(resource_path, (404, "404 page not found"))
            if status != 200:
                raise ApiError(status, body)
            return types.SimpleNamespace(status=status, data=body.encode())

    claims = ClusterClaims(Old())
    assert claims.get_claim("ns", "c1").ref.name == "c1"
    _, method, options = calls[-1]
    assert (method, options["_preload_content"]) == ("GET", False)
    assert options["_request_timeout"] == (3.0, 10.0)
    assert options["auth_settings"] == ["BearerToken"]
    get_error(claims, ClaimNotFoundError, "c2")
    server.answers[claim_path()] = (403, b"")
    get_error(claims, ClusterForbiddenError)
    server.answers[claim_path()] = (0, None)
    get_error(claims, ClusterUnavailableError)


def test_clients_from_37(server, api):
    """A client with the two steps of versions from 37, and nothing else, is enough."""
    if not hasattr(api, "param_serialize"):
        pytest.skip("needs version 37 or later")
    server.serve("v1")

    class New:
        param_serialize = api.param_serialize
        call_api = api.call_api

    claims = ClusterClaims(New())
    assert claims.get_claim("ns", "c1").ref.name == "c1"
    server.answers[claim_path()] = (403, "{}")
    get_error(claims, ClusterForbiddenError)
