#!/usr/bin/env python3
"""Compiles protos/*.proto into drastate/drivers/_pb: one descriptor set, and a typed stub per file.

Needs grpcio-tools and mypy-protobuf, in the versions named below so that the output is the same
everywhere:

    pip install grpcio-tools==1.62.0 mypy-protobuf==3.6.0 "setuptools<80"
    python protos/generate.py            # writes
    python protos/generate.py --check    # exits 1 when what is committed is stale

No *_pb2.py is generated. Such modules register their messages in the process-wide descriptor pool,
where a host program may carry the same ones, and they refuse a protobuf runtime older than the
generator. A descriptor set has neither problem: `drastate.drivers._pb` loads it into a pool of its
own.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
OUTPUT = ROOT / "drastate" / "drivers" / "_pb"

#: Where protoc is told that the files lie. It becomes the file name inside the descriptors, and
#: must be one that no other project uses: a bare `api.proto` is what all the kubelet's are called.
VIRTUAL_FOLDER = "drastate/drivers/_pb"


def compile_protos(folder: Path) -> dict[str, bytes]:
    """The generated files by name, built in ``folder``."""
    from grpc_tools import protoc  # type: ignore[import-untyped,unused-ignore]  # noqa: PLC0415

    # protoc finds the plugin of mypy-protobuf on the PATH; it lies beside the interpreter in a
    # virtual environment.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    names = sorted(path.name for path in PROTOS.glob("*.proto"))
    descriptors = folder / "descriptors.binpb"
    arguments = [
        "protoc",
        f"-I{VIRTUAL_FOLDER}={PROTOS}",
        f"--descriptor_set_out={descriptors}",
        f"--mypy_out=quiet:{folder}",
        *(f"{VIRTUAL_FOLDER}/{name}" for name in names),
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit(1)
    generated = {descriptors.name: descriptors.read_bytes()}
    for name in names:
        stem = name.removesuffix(".proto")
        stub = folder / VIRTUAL_FOLDER / f"{stem}_pb2.pyi"
        generated[f"{stem}.pyi"] = stub.read_bytes()
    return generated


def main() -> int:
    """Writes the generated files, or with --check compares them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when stale")
    check_only: bool = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        generated = compile_protos(Path(folder))
    stale = [
        name
        for name, content in generated.items()
        if not (OUTPUT / name).is_file() or (OUTPUT / name).read_bytes() != content
    ]
    if check_only:
        for name in stale:
            print(f"stale: {(OUTPUT / name).relative_to(ROOT)}; run python protos/generate.py")  # noqa: T201
        return 1 if stale else 0
    for name in stale:
        (OUTPUT / name).write_bytes(generated[name])
        print(f"written: {(OUTPUT / name).relative_to(ROOT)}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
