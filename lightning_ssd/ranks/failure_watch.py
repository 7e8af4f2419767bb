"""`FailureWatch`: a training ends in time after the failure of any rank, whatever its threads wait for."""

import os
import sys
import threading

from lightning_ssd.futures import Future
from lightning_ssd.ranks.messages import RankMessages
from lightning_ssd.torch_internals import abort_process_groups

_SECONDS = 8.0
"""Time in which the training thread has to see a failure, of the ten seconds in which a training ends."""


class FailureWatch:
    """Aborts the communicators of torch.distributed once a rank has failed, so that no stream waits for that rank.

    A collective of gloo can't be aborted: it ends with an error when the other process has ended. If the training
    thread has not ended its work with an error in time, the process ends with the failure as its last line. Scratch
    files remain then, as after a kill.

    Threads: two of its own, `failure` and `abort`, which begin with the first failure.
    """

    def __init__(self, messages: RankMessages) -> None:
        self._messages = messages
        self._noticed = threading.Event()
        """Set once the training thread has seen an error; its own end follows."""
        messages.failed.add_done_callback(self._begin)

    def notice(self, error: BaseException) -> BaseException | None:
        """Tells all ranks of the error that ends this rank's training. Returns the failure of another rank before it.

        A collective may end with an error just before the end of the other process is known: it is waited for.
        """
        self._noticed.set()
        text = str(error)
        if "closed by peer" in text or "reset by peer" in text:
            self._messages.failed.wait(_SECONDS)
        if self._messages.failed.done():
            return self._messages.failed.exception()
        self._messages.fail(error)
        return None

    def end(self) -> None:
        """Ends the watch: the training has ended."""
        self._noticed.set()

    def check(self) -> None:
        """Raises RankError if a rank has failed: results of collectives may be wrong since then."""
        if self._messages.failed.done():
            self._messages.failed.result()

    def _begin(self, failed: "Future[None]") -> None:
        for target, name in ((abort_process_groups, "abort"), (self._end, "failure")):
            threading.Thread(target=target, name=f"lightning_ssd-{name}", daemon=True).start()

    def _end(self) -> None:
        if not self._noticed.wait(_SECONDS):
            print(f"lightning_ssd: {self._messages.failed.exception()}", file=sys.stderr, flush=True)
            os._exit(1)
