"""The records of `recover=True`: which submitted steps the journal has named, and which it has not."""

from collections.abc import Callable, Mapping

from lightning_ssd.futures import Future, finished, then
from lightning_ssd.interrupts import uninterrupted
from lightning_ssd.model_states.gradients import GradientOffloader
from lightning_ssd.model_states.journal import Journal, PlainData
from lightning_ssd.model_states.stores import StateStore
from lightning_ssd.model_states.units import FlatParameter
from lightning_ssd.shutdown import Shutdown
from lightning_ssd.waits import wait_for, wait_for_all


class StepRecords:
    """Records optimizer steps, so that a killed run can resume with the last one that all flat parameters have made.

    Threads: the training thread, or autograd's while that waits. `last` completes on the journal's thread, and has no
    callback of this class.

    Ownership: values of the version that a record names are kept until `last` is done: the next step, which overwrites
    them, waits for it.

    Args:
        journal: writes the records; owned. None: steps are not recorded.
        stores: where the values of each flat parameter are stored.
        gradients: gradients of the flat parameters that are stepped.

    Attributes:
        last: done when the last record is written.
    """

    def __init__(
        self, journal: Journal | None, stores: Mapping[FlatParameter, StateStore], gradients: GradientOffloader
    ) -> None:
        self.last: Future[None] = finished(None)
        self._journal = journal
        self._stores = stores
        self._gradients = gradients
        self._unrecorded: dict[FlatParameter, Future[None]] = {}
        """Steps that no record names."""

    @property
    def enabled(self) -> bool:
        """Whether steps are recorded."""
        return self._journal is not None

    @property
    def pending(self) -> bool:
        """Whether a step was submitted that no record names, and steps are recorded."""
        return bool(self._unrecorded)

    def check_recorded(self, flat: FlatParameter) -> None:
        """Raises RuntimeError if the last step of `flat` was not recorded: a record can't name that and the next."""
        if flat in self._unrecorded:
            raise RuntimeError(
                f"{flat.name} is stepped twice in one `training_step`, and `recover=True` can record one step of each "
                "parameter there. Step once, or set `recover=False`."
            )

    def add(self, submitted: "Mapping[FlatParameter, Future[None]]") -> None:
        """Adds the steps that the next record names."""
        if self._journal is not None:
            self._unrecorded |= submitted

    @uninterrupted
    def write(self, training_state: Callable[[], PlainData]) -> None:
        """Submits a record of the submitted steps; the next steps wait for it.

        Args:
            training_state: returns all other state to resume from, on the CPU; called on the journal's thread.

        Raises:
            RuntimeError: a flat parameter without a step has gradients, which a record does not contain.
        """
        assert self._journal is not None
        unrecorded = self._unrecorded
        for flat, gradient in self._gradients.items():
            if flat not in unrecorded and (gradient.accumulating or any(gradient.arrived)):
                raise RuntimeError(
                    f"{flat.name} keeps gradients from one batch to the next while others are stepped, and "
                    "`recover=True` does not record them. Call `zero_grad` of its optimizer, too, or set "
                    "`recover=False`."
                )
        needed = [then(unrecorded.get(flat, finished(None)), store.written) for flat, store in self._stores.items()]
        self.last = self._journal.write([self.last, *needed], training_state)
        self._unrecorded = {}

    def wait(self) -> None:
        """Returns when the last record is written.

        Raises:
            Exception: it could not be written.
        """
        wait_for(self.last, "the record of the last step")

    def drop(self) -> None:
        """Removes the last record, since values that it names are about to change: a killed run would begin anew."""
        if self._journal is not None:
            wait_for_all([self.last], "the record of the last step")
            self._journal.forget()

    def close(self) -> None:
        """Ends the journal's thread after its last record."""
        if self._journal is not None:
            wait_for_all([self.last], "the record of the last step")
            self._journal.close()

    def end(self, shutdown: Shutdown) -> bool:
        """Removes the last record if training has ended without an error, before the values that it names are freed.

        Returns:
            Whether a record is kept for the next run.
        """
        if self._journal is None:
            return False
        if shutdown.failure is None:
            shutdown.run(self._journal.forget)
        return self._journal.written
