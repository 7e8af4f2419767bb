"""`Tensor.grad` of offloaded parameters, which user code may read and write between backward and step."""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping

from torch import Tensor
from torch.optim import Optimizer

from lightning_ssd.model_states.access.parameter import (
    AliasGraph,
    OffloadedView,
    OperatorAccess,
    Source,
    hollow,
    not_followed,
)
from lightning_ssd.model_states.access.torch_functions import Kind
from lightning_ssd.model_states.gradients import Gradient, GradientOffloader, GradientState
from lightning_ssd.model_states.stores import write_changed
from lightning_ssd.model_states.units import FlatParameter
from lightning_ssd.waits import wait_for


class GradientSource(Source):
    """The gradient of one parameter, with the shape, dtype and device that it has in plain training.

    Attributes:
        lost: the error of reads, if a step has used the values and the gradient was replaced; else None.
        view: weak reference to the tensor that `Tensor.grad` has returned.
    """

    def __init__(self, access: OperatorAccess, gradients: "GradientAccess", flat: FlatParameter, index: int) -> None:
        super().__init__(access, flat, index, f"the gradient of {flat.param_views[index].name}")
        self._gradients = gradients
        self.lost: str | None = None
        self.view: weakref.ref[OffloadedView] | None = None

    def read(self) -> Tensor:
        if self.lost is not None:
            raise RuntimeError(self.lost)
        accum = self._gradients.whole(self.flat, self.index)
        return self.item.of(accum).to(self.flat.device, self.item.dtype, copy=True)

    def write(self, values: Tensor) -> None:
        accum = self._gradients.whole(self.flat, self.index)
        write_changed(self.item.of(accum), values.detach().to("cpu"))
        self._gradients.offloader.norms.remeasure(self.flat, [self.index])


class GradientAccess:
    """Implements the semantics of `Tensor.grad` for offloaded gradients.

    Duty: reads and writes of `Tensor.grad`, and its aliases in user code. The gradients are kept on the host.

    Threads: the training thread, or autograd's while the training thread waits in `backward`.

    Ownership: a tensor that was returned reads the host gradient until that is replaced; then it is an ordinary tensor.

    Args:
        gradients: gradient of each flat parameter that is stepped; not owned.
        offloader: accumulates the gradients, and measures those that user code has changed.
        apply_clipping: called before gradients of an optimizer's flat parameter are read, changed or added to: their
            clipping may have been left to the step.
    """

    def __init__(
        self,
        gradients: Mapping[FlatParameter, Gradient],
        offloader: GradientOffloader,
        apply_clipping: Callable[[FlatParameter], None],
    ) -> None:
        self._gradients = gradients
        self.offloader = offloader
        self._apply_clipping = apply_clipping
        self._sources: weakref.WeakValueDictionary[tuple[FlatParameter, int], GradientSource] = (
            weakref.WeakValueDictionary()
        )
        """Gradients that user code references."""
        self.access: OperatorAccess
        """Runs operators on the gradients; set by the owner."""
        self.hidden = False
        """Whether `Tensor.grad` hides offloaded gradients: optimizers step the other parameters."""

    @contextlib.contextmanager
    def hide(self, hide: bool = True) -> Iterator[None]:
        """Hides offloaded gradients within the context, or shows them."""
        before, self.hidden = self.hidden, hide
        try:
            yield
        finally:
            self.hidden = before

    def get(self, flat: FlatParameter, index: int) -> Tensor | None:
        """Returns the gradient of a parameter, as `Tensor.grad` does."""
        own: Tensor | None = flat.param_views[index].parameter.grad
        if own is not None or self.hidden or flat not in self._gradients:
            return own
        gradient = self._gradients[flat]
        if gradient.states[index] is GradientState.NONE:
            return None
        if index in gradient.assigned:
            return gradient.assigned[index]
        source = self._sources.get((flat, index))
        view = None if source is None or source.view is None else source.view()
        if view is None:
            source = source or GradientSource(self.access, self, flat, index)
            self._sources[flat, index] = source
            item = source.item
            memory = hollow(item.shape, item.stride, item.dtype, flat.device)
            graph = AliasGraph(gradient.followed, index)
            view = OffloadedView.make(source, 0, memory, versioned=False, backed=False, graph=graph)
            source.view = weakref.ref(view)
        return view

    def set(self, flat: FlatParameter, index: int, values: Tensor | None) -> None:
        """Assigns the gradient of a parameter, as `Tensor.grad` does.

        Raises:
            RuntimeError: its shape, dtype or device is not the parameter's.
        """
        item = flat.param_views[index]
        if flat not in self._gradients:
            item.parameter.grad = values
            return
        gradient = self._gradients[flat]
        if isinstance(values, OffloadedView):
            if values is self.get(flat, index):
                return
            values = self.access.run(Kind.OPERATOR, Tensor.clone, (values,), {})
        plain = (item.shape, item.dtype, flat.device)
        if values is not None and (values.shape, values.dtype, values.device) != plain:
            raise RuntimeError(
                f"the gradient that is assigned to {item.name} is {values.dtype} {list(values.shape)} on "
                f"{values.device}, and the parameter is {plain[1]} {list(plain[0])} on {plain[2]}."
            )
        self._apply_clipping(flat)
        self.detach_views(flat, index)
        if gradient.states[index] is GradientState.PRESENT and index not in gradient.assigned:
            self._accumulate_arrived(flat)
        gradient.assign(index, values)
        self.offloader.norms.remeasure(flat, [index])

    def check_graphs(self) -> None:
        """Raises RuntimeError if autograd could differentiate a gradient in plain training."""
        for flat, gradient in self._gradients.items():
            for index in gradient.followed:
                raise not_followed(f"the gradient of {flat.param_views[index].name}")

    def add(self, flat: FlatParameter, index: int, values: Tensor) -> None:
        """Adds `values` to the gradient of a parameter in fp32, unless the running backward ignores it.

        Raises:
            RuntimeError: no optimizer has the parameter.
        """
        if flat.param_views[index].parameter in self.offloader.backward.ignored:
            return
        gradient = self._gradients.get(flat)
        if gradient is None:
            raise RuntimeError(f"{flat.param_views[index].name} has a gradient, and is in no optimizer.")
        if values.requires_grad:
            gradient.followed.add(index)
        self._apply_clipping(flat)
        if gradient.states[index] is GradientState.STEPPED:
            self.offloader.resume_accumulation(flat, index)
        self._accumulate_arrived(flat)
        gradient.fold()
        accum = flat.param_views[index].of(gradient.accumulated())
        if gradient.has_accum[index]:
            accum.add_(values.detach().to("cpu"))
        else:
            accum.copy_(values.detach())
        gradient.set_accumulated(index)
        self.offloader.norms.remeasure(flat, [index])

    def whole(self, flat: FlatParameter, index: int) -> Tensor:
        """Returns the gradients of `flat` on the host in fp32, with that of parameter `index`.

        Raises:
            RuntimeError: a step has used the gradient and not kept it.
        """
        gradient = self._gradients[flat]
        self._apply_clipping(flat)
        if gradient.states[index] is GradientState.STEPPED:
            if not gradient.retained:
                raise RuntimeError(
                    f"the gradient of {flat.param_views[index].name} was consumed by its optimizer step, which runs as "
                    "soon as the gradient is complete. Read or change it in `on_after_backward` or "
                    "`on_before_optimizer_step`: where one of them is overridden, steps wait until backward has ended."
                )
            wait_for(gradient.consumed, "gradients")
            return gradient.used()
        self._accumulate_arrived(flat)
        return gradient.accumulated()

    def zero(self, optimizer: Optimizer, none: bool) -> None:
        """Drops the gradients of the parameters of `optimizer`, or fills them with zeros if `none` is False."""
        for flat, gradient in self.offloader.of(optimizer):
            present = [index for index, state in enumerate(gradient.states) if state is not GradientState.NONE]
            if none and self._sources:
                for index in present:
                    self.detach_views(flat, index)
            gradient.drop()
            if not none and present:
                wait_for(gradient.consumed, "gradients")
                for index in present:
                    flat.param_views[index].of(gradient.accumulated()).zero_()
                    gradient.set_accumulated(index)
            self.offloader.norms.remeasure(flat, present)

    def detach_views(self, flat: FlatParameter, index: int) -> None:
        """Makes tensors of user code that alias a gradient ordinary ones, before the gradient is replaced."""
        if (source := self._sources.pop((flat, index), None)) is not None:
            try:
                source.end_aliases(source.read())
            except RuntimeError as error:  # a step has used it: the values of the next gradient would be wrong ones
                source.lost = str(error)

    def _accumulate_arrived(self, flat: FlatParameter) -> None:
        """Returns when all copied gradients of `flat` are accumulated."""
        gradient = self._gradients[flat]
        if any(gradient.arrived):
            self.offloader.accumulate(flat)
        wait_for(gradient.consumed, "gradients")
