"""What a fake driver does wrong, and for how long."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import grpc

#: For `Behaviour.fail_times`.
ALWAYS = math.inf


@dataclass(slots=True)
class Behaviour:
    """How the driver treats one of its two calls. Every field can be changed at any time.

    Attributes:
        fail_times: how many more calls fail; `ALWAYS` for all. Counted down.
        error: the text of such failures.
        code: None: each claim of the call gets ``error``; else the whole call ends with this
            status.
        fails: UIDs of the claims that fail; None: all.
        devices_too: a claim's error is sent together with its devices.
        late: a call that fails takes effect all the same.
        delay_s: pause before anything is done.
        hang: nothing is done while this is true; afterwards the call goes on, client or no client.
        omit: UIDs of claims that are left out of the answer; True: all. The call takes effect.
        empty: UIDs of claims whose entry in the answer has no content.
        foreign: UIDs that are added to the answer.
        garbage: bytes that are sent in place of the answer; the call takes effect.
    """

    fail_times: float = 0
    error: str = "made to fail"
    code: grpc.StatusCode | None = None
    fails: Collection[str] | None = None
    devices_too: bool = False
    late: bool = False
    delay_s: float = 0.0
    hang: bool = False
    omit: Collection[str] | bool = ()
    empty: Collection[str] = ()
    foreign: Sequence[str] = ()
    garbage: bytes | None = None

    def takes_failure(self, uids: Collection[str]) -> bool:
        """Whether a call for claims ``uids`` fails; counts it. Not thread-safe."""
        concerned = self.fails is None or not set(self.fails).isdisjoint(uids)
        if self.fail_times <= 0 or not concerned:
            return False
        self.fail_times -= 1
        return True

    def does_fail(self, uid: str) -> bool:
        """Whether claim ``uid`` is among those that fail when a call fails."""
        return self.fails is None or uid in self.fails

    def does_omit(self, uid: str) -> bool:
        """Whether claim ``uid`` is left out of an answer."""
        return self.omit if isinstance(self.omit, bool) else uid in self.omit
