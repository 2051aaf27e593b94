"""Per pod, one JSON file that tells a container runtime which CDI devices to inject.

    {"pod": {"uid": …, "namespace": …, "name": …}, "boot_id": …,
     "containers": [{"name": …, "cdi_devices": […], "annotations": {…}}, …]}

A file is there only while every device in it is prepared: it appears after the last driver has
answered and goes before the first one is told to let go. It is replaced whole or not at all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote, unquote

from drastate.errors import InvalidPodError, LedgerUnwritableError
from drastate.model import ContainerInfo, Pod, PodUID

_SUFFIX = ".json"
#: Longest file name that every Linux file system takes.
_NAME_MAX = 255


class DeviceFiles:
    """The device files in one folder."""

    def __init__(self, folder: Path, boot_id: str | None) -> None:
        """Makes the folder, and removes what an earlier boot (or a crash) left in it.

        Args:
            folder: where the files are; made with mode 0700.
            boot_id: the present boot; files of another one tell of devices that are gone.

        Raises:
            LedgerUnwritableError: the folder cannot be made or read.
        """
        self._folder = folder
        self._boot_id = boot_id
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for path in list(folder.iterdir()):
                if path.suffix != _SUFFIX or not self._is_of_this_boot(path):
                    path.unlink()
        except OSError as error:
            raise self._unwritable(error) from error

    def _is_of_this_boot(self, path: Path) -> bool:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return (
            isinstance(found, dict)
            and self._boot_id is not None
            and found.get("boot_id") == self._boot_id
        )

    def pods(self) -> set[PodUID]:
        """The pods that have a file.

        Raises:
            LedgerUnwritableError: the folder cannot be read.
        """
        try:
            names = os.listdir(self._folder)  # noqa: PTH208 (names are all that is needed)
        except OSError as error:
            raise self._unwritable(error) from error
        return {
            PodUID(unquote(name.removesuffix(_SUFFIX))) for name in names if name.endswith(_SUFFIX)
        }

    def write(self, pod: Pod, containers: Mapping[str, ContainerInfo]) -> None:
        """Writes a pod's file: whole and synced, or not at all.

        Raises:
            InvalidPodError: the UID is too long for a file name.
            LedgerUnwritableError: it cannot be written.
        """
        content = {
            "pod": {"uid": pod.uid, "namespace": pod.namespace, "name": pod.name},
            "boot_id": self._boot_id,
            "containers": [
                {
                    "name": name,
                    "cdi_devices": list(info.cdi_devices),
                    "annotations": dict(info.annotations),
                }
                for name, info in containers.items()
            ],
        }
        path = self._path(pod.uid)
        partial = path.with_name(f".{path.name}.partial")
        try:
            fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with open(fd, "w", encoding="utf-8") as file:  # noqa: PTH123 (the descriptor has the mode)
                json.dump(content, file, indent=1)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            partial.rename(path)
            self._sync_folder()
        except OSError as error:
            with suppress(OSError):
                partial.unlink()
            raise self._unwritable(error) from error

    def remove(self, pod_uid: PodUID) -> None:
        """Removes a pod's file; none there is fine.

        Raises:
            LedgerUnwritableError: it cannot be removed.
        """
        try:
            self._path(pod_uid).unlink()
            self._sync_folder()
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._unwritable(error) from error

    def _path(self, pod_uid: PodUID) -> Path:
        # A UID is whatever a manifest says: quoted, it names a file in this folder and nowhere
        # else.
        name = quote(pod_uid, safe="") + _SUFFIX
        if len(name) + len("..partial") > _NAME_MAX:
            raise InvalidPodError(f"pod UID {pod_uid[:40]}… is too long to name a file; shorten it")
        return self._folder / name

    def _sync_folder(self) -> None:
        fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def _unwritable(self, error: OSError) -> LedgerUnwritableError:
        return LedgerUnwritableError(
            f"the device files in {self._folder} cannot be kept: {error.strerror}; check the disk"
            " and the folder's owner and mode",
            path=str(self._folder),
        )
