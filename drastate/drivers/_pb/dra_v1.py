"""Messages of the package k8s.io.kubelet.pkg.apis.dra.v1; typed by the stub of the same name."""

from drastate.drivers._pb.pool import message

_PACKAGE = "k8s.io.kubelet.pkg.apis.dra.v1"

Claim = message(f"{_PACKAGE}.Claim")
Device = message(f"{_PACKAGE}.Device")
NodePrepareResourcesRequest = message(f"{_PACKAGE}.NodePrepareResourcesRequest")
NodePrepareResourcesResponse = message(f"{_PACKAGE}.NodePrepareResourcesResponse")
NodePrepareResourceResponse = message(f"{_PACKAGE}.NodePrepareResourceResponse")
NodeUnprepareResourcesRequest = message(f"{_PACKAGE}.NodeUnprepareResourcesRequest")
NodeUnprepareResourcesResponse = message(f"{_PACKAGE}.NodeUnprepareResourcesResponse")
NodeUnprepareResourceResponse = message(f"{_PACKAGE}.NodeUnprepareResourceResponse")
