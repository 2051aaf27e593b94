"""Reads a pod, as its user has it (client object, JSON, YAML), into a `drastate.model.Pod`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from drastate.errors import InvalidManifestError, InvalidPodError
from drastate.kube.fields import Field, describe, is_client_model
from drastate.kube.files import read_text
from drastate.kube.text import read_documents
from drastate.kube.warn import WarnOnce
from drastate.model import Container, Pod, PodClaim, PodUID, RequestRef

if TYPE_CHECKING:
    from collections.abc import Iterable

    from drastate.kube.fields import Fail

_warnings = WarnOnce(__name__)


def parse_pod(obj: object) -> Pod:
    """Reads a pod and resolves the names of its claims.

    A claim whose name is not known yet is no error here: its `PodClaim.unresolved` says why.

    Args:
        obj: a ``kubernetes.client.V1Pod``; the API's JSON as a mapping; YAML or JSON text of one
            pod; a `pathlib.Path` of a file with that; or a `Pod`, which is given back.

    Returns:
        The pod. Without a namespace it is in "default", as in a manifest.

    Raises:
        InvalidPodError: no UID, no name, a field of the wrong type, a container that refers to a
            pod claim that does not exist, text that is no YAML; the text names the field and the
            remedy.

    Source:
        kubelet dynamic-resource-allocation ``resourceclaim.Name`` for the names, and
        ``Manager.GetResources`` for the requests of extended resources (KEP 5004).
    """
    if isinstance(obj, Pod):
        return obj
    raw, origin = _load(obj)
    root = _root(raw, origin)
    _check_kind(root)
    _check_version(root)
    metadata = root.member("metadata")
    if metadata.value is None:
        root.fail("metadata is missing: a pod needs metadata.name and metadata.uid")
    name = metadata.need("name")
    namespace = metadata.text("namespace") or "default"
    root = Field(raw, "", _fail(f"{origin}pod {namespace}/{name}"))
    spec, status = root.member("spec"), root.member("status")
    uid = _uid(root)
    claims = _claims(spec, status)
    containers = _containers(spec, {claim.name for claim in claims})
    extended = status.member("extendedResourceClaimStatus")
    extended_claim = None
    if extended.value is not None:
        extended_claim = extended.need("resourceClaimName")
        containers = _with_extended(containers, extended, uid)
    return Pod(
        uid=uid,
        namespace=namespace,
        name=name,
        claims=claims,
        containers=tuple(container for container, _ in containers),
        extended_claim=extended_claim,
        pod_group=_pod_group(spec),
    )


def parse_pod_uid(obj: object) -> PodUID:
    """Reads a pod's UID, and nothing else: spec and status may be empty, absent or wrong.

    Args:
        obj: what `parse_pod` takes; or the UID itself as text (text with a newline, "{" or ": " is
            YAML).

    Returns:
        The UID.

    Raises:
        InvalidPodError: there is no UID in it.

    Source:
        ours: cleanup must not depend on what others may have done to the pod object (k8s #139772).
    """
    if isinstance(obj, Pod):
        return obj.uid
    if isinstance(obj, str) and not any(mark in obj for mark in ("\n", "{", ": ")):
        uid = obj.strip()
        if not uid:
            raise InvalidPodError("the pod's UID is empty: pass metadata.uid of the pod")
        return _checked_uid(Field(uid, "UID", _fail("pod")))
    raw, origin = _load(obj)
    root = _root(raw, origin)
    _check_kind(root)
    return _uid(root)


# --- what was passed ------------------------------------------------------------------------------


def _fail(subject: str) -> Fail:
    def fail(message: str) -> InvalidPodError:
        return InvalidPodError(f"{subject}: {message}")

    return fail


def _root(raw: object, origin: str) -> Field:
    if not isinstance(raw, Mapping) and not is_client_model(raw):
        hint = ""
        if isinstance(raw, str):
            hint = "; for the name of a file, pass pathlib.Path(...)"
        raise InvalidPodError(
            f"{origin}a pod must be a V1Pod, a mapping, YAML or JSON text, or a pathlib.Path, "
            f"not {describe(raw)}{hint}"
        )
    return Field(raw, "", _fail(f"{origin}pod"))


def _load(obj: object) -> tuple[object, str]:
    """The raw object, and where it comes from as the beginning of an error text."""
    if isinstance(obj, Path):
        try:
            text = read_text(obj).text
        except OSError as exc:
            reason = exc.strerror or type(exc).__name__
            raise InvalidPodError(f"{obj}: the pod's file cannot be read: {reason}") from exc
        except InvalidManifestError as exc:
            raise InvalidPodError(exc.message) from exc
        return _only_pod(text, f"{obj}: "), f"{obj}: "
    if isinstance(obj, str):
        return _only_pod(obj, ""), ""
    return obj, ""


def _only_pod(text: str, origin: str) -> object:
    documents, problems = read_documents(text)
    if problems:
        raise InvalidPodError(f"{origin}the pod's text is not valid YAML: {problems[0]}")
    if len(documents) == 1:
        return documents[0].value
    pods = [
        document.value
        for document in documents
        if isinstance(document.value, Mapping) and document.value.get("kind") == "Pod"
    ]
    if len(pods) != 1:
        raise InvalidPodError(
            f"{origin}expected one pod, found {len(pods)} in {len(documents)} YAML documents"
        )
    return pods[0]


def _check_kind(root: Field) -> None:
    # Client models mostly come without a kind, but the type of their spec tells what they are.
    if is_client_model(root.value):
        spec = getattr(type(root.value), "openapi_types", {}).get("spec")
        if spec != "V1PodSpec" or not root.has_member("status"):
            root.fail(f"must be a V1Pod, not a {type(root.value).__name__}")
    kind = root.text("kind")
    if kind not in (None, "", "Pod"):
        root.fail(f"this is a {kind}, not a Pod")


def _check_version(root: Field) -> None:
    version = root.text("apiVersion")
    if version not in (None, "", "v1"):
        root.fail(f"apiVersion must be v1, not {version}")


def _uid(root: Field) -> PodUID:
    field = root.member("metadata").member("uid")
    uid = field.as_text()
    if not uid:
        root.fail(
            "metadata.uid is missing: the UID tells this pod from all others, for ever, and the "
            "API server gives every pod one; in a hand-written manifest, set it to a new one (the "
            "output of uuidgen, in quotes)"
        )
    return _checked_uid(field)


def _checked_uid(field: Field) -> PodUID:
    uid = field.as_text() or ""
    if " " in uid:
        field.fail(f"{field.path} must be one word, not {uid[:80]!r}")
    return PodUID(uid)


# --- claims ---------------------------------------------------------------------------------------


def _claims(spec: Field, status: Field) -> tuple[PodClaim, ...]:
    claims: dict[str, PodClaim] = {}
    for entry in spec.items("resourceClaims"):
        name = entry.need("name")
        if name in claims:
            entry.fail(f'{entry.below("name")}: there is another pod claim named "{name}"')
        claims[name] = _claim(name, entry, status)
    return tuple(claims.values())


def _claim(name: str, entry: Field, status: Field) -> PodClaim:
    direct, template = entry.text("resourceClaimName"), entry.text("resourceClaimTemplateName")
    if not direct and not template:  # up to Kubernetes 1.30 both were one level deeper
        source = entry.member("source")
        direct, template = (
            source.text("resourceClaimName"),
            source.text("resourceClaimTemplateName"),
        )
    if direct:
        return PodClaim(name, direct)
    if not template:
        return PodClaim(name, None, unresolved=_no_source(entry))
    for each in status.items("resourceClaimStatuses"):
        if each.text("name") == name:
            generated = each.text("resourceClaimName")
            if generated == "":
                break
            return PodClaim(name, generated, from_template=True)
    unresolved = (
        "its ResourceClaim is not created yet: the kube-controller-manager makes it from "
        f'ResourceClaimTemplate "{template}" and then names it in status.resourceClaimStatuses '
        "of the pod, which does not name it now; where no such controller runs, create the "
        "ResourceClaim and name it with resourceClaimName"
    )
    return PodClaim(name, None, from_template=True, unresolved=unresolved)


def _no_source(entry: Field) -> str:
    if is_client_model(entry.value) and not entry.has_member("resourceClaimName"):
        return (
            "this version of the kubernetes client does not know resourceClaimName and dropped it: "
            "use version 31 or later, or pass the pod as JSON"
        )
    return (
        "neither resourceClaimName nor resourceClaimTemplateName is set: set one of them in "
        "spec.resourceClaims of the pod"
    )


def _pod_group(spec: Field) -> str | None:
    group = spec.member("schedulingGroup").text("podGroupName")
    return group or spec.member("workloadRef").text("podGroup") or None


# --- containers -----------------------------------------------------------------------------------

#: A container with the names of the resources it has a non-zero amount of.
_Sized = tuple[Container, frozenset[str]]


def _containers(spec: Field, claims: set[str]) -> list[_Sized]:
    found: dict[str, _Sized] = {}
    for kind in ("initContainers", "containers", "ephemeralContainers"):
        for entry in spec.items(kind):
            name = entry.need("name")
            if name in found:
                entry.fail(f'{entry.below("name")}: there is another container named "{name}"')
            resources = entry.member("resources")
            requests = tuple(_request(each, claims) for each in resources.items("claims"))
            found[name] = (Container(name, requests), _resource_names(resources))
    return list(found.values())


def _request(entry: Field, claims: set[str]) -> RequestRef:
    name = entry.need("name")
    if name not in claims:
        entry.fail(f'{entry.below("name")}: spec.resourceClaims has no pod claim named "{name}"')
    return RequestRef(name, entry.text("request") or "")


def _resource_names(resources: Field) -> frozenset[str]:
    found: set[str] = set()
    for kind in ("requests", "limits"):
        for name, quantity in resources.members(kind).items():
            if not isinstance(quantity, (str, int, float)):
                path = f"{resources.below(kind)}[{' '.join(str(name).split())}]"
                resources.fail(f"{path} must be a quantity, not {describe(quantity)}")
            # Only the digits before a suffix or an exponent tell zero from the rest: "0", "0.0Mi",
            # "0e3".
            mantissa = str(quantity).lower().partition("e")[0]
            if any(digit in mantissa for digit in "123456789"):
                found.add(str(name))
    return frozenset(found)


def _with_extended(containers: Iterable[_Sized], extended: Field, pod_uid: PodUID) -> list[_Sized]:
    by_name = {container.name: (container, resources) for container, resources in containers}
    requests: dict[str, dict[str, None]] = {name: {} for name in by_name}
    for mapping in extended.items("requestMappings"):
        container, resource = mapping.need("containerName"), mapping.need("resourceName")
        request = mapping.need("requestName")
        if container not in by_name:
            message = "Extended resource mapping ignored: the pod has no such container"
        elif resource not in by_name[container][1]:
            message = "Extended resource mapping ignored: the container has no such resource"
        else:
            requests[container][request] = None
            continue
        _warnings.warn(message, pod_uid=pod_uid, container=container, resource=resource)
    return [
        (Container(container.name, container.requests, tuple(requests[container.name])), resources)
        for container, resources in by_name.values()
    ]
