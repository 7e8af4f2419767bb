"""Weights, gradients and optimizer states of one model out of the device's memory.

One step: a unit's weights are fetched around its forward and backward (`stream`), its gradients leave as they appear
(LoHan's active gradient offloading), and when the last one of a flat has landed its optimizer step runs on the CPU
while the device goes on (`stepper`). The next forward of a unit waits for that unit's step alone. Parameters that stay
on the device (small ones) are stepped by the user's optimizer as ever: those that have left have no `.grad` when its
`step` looks.

Threads: the training thread and, while it waits in `backward`, autograd's threads call in here, one at a time; the
stepper's thread runs what `_submit_sum` and `_launch` hand to it, with the buffers that these name; completion and
I/O threads only move bytes and futures.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_ssd.activations.copies import Copies, Mark
from lightning_ssd.activations.weights import mark_streamed
from lightning_ssd.states.flat import Flat
from lightning_ssd.states.futures import finished
from lightning_ssd.states.gradient import Gradient
from lightning_ssd.states.home import Home, Opened
from lightning_ssd.states.optimizers import Rule
from lightning_ssd.states.parameter import StreamedParameter
from lightning_ssd.states.stepper import Stepper
from lightning_ssd.states.stream import WeightStream
from lightning_ssd.storage.slab import Slab

Overlap = Literal["none", "optimized"]


class ModelStates:
    """Moves and steps the flats of one model.

    Args:
        module: the model; its parameters outside the flats are on the device.
        units: of each unit, the modules whose forward needs it, and its flats.
        homes: where each flat lives; filled with its weights.
        rules: how each flat is stepped; none for those without gradients.
        groups: of each flat with a rule, its optimizer and the index of its parameter group.
        copies: copies of the device; owned.
        budget: bytes of the device that fetched weights may take.
        overlap: "none": a step's jobs run when backward has ended, and the step waits for them.
        clips: whether gradients are clipped in every step, which holds the jobs back until the norm is known.
        hold: whether user code may look at gradients or settings between backward and step: nothing begins earlier.
    """

    #: Bytes of gradients that may be on their way out at once.
    WINDOW = 256 * 2**20

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[tuple[Sequence[nn.Module], Sequence[Flat]]],
        homes: Mapping[Flat, Home],
        rules: Mapping[Flat, Rule],
        groups: Mapping[Flat, tuple[Optimizer, int]],
        copies: Copies,
        *,
        budget: int,
        overlap: Overlap,
        clips: bool,
        hold: bool,
    ) -> None:
        self.homes = homes
        self._rules = rules
        self._groups = groups
        self._copies = copies
        self._overlap = overlap
        self._clips = clips
        self._hold = hold
        self._stream = WeightStream([flats for _, flats in units], homes, copies, budget)
        self._order = {flat: index for index, (_, flats) in enumerate(units) for flat in flats}
        self._gradients = {flat: Gradient(flat, pin=copies.device.type == "cuda") for flat in rules}
        self._expected: dict[tuple[Flat, tuple[bool, ...]], int] = {}
        """Landings of a flat in its last backward, by which of its parameters wanted a gradient."""
        self._leaving: deque[tuple[Tensor, Mark]] = deque()
        """Gradients on the device until their copies out were made."""
        self._leaving_bytes = 0
        self._launched: dict[Flat, Future[None]] = {}
        """Steps that have begun since the last `optimizer.step`."""
        self._sums: dict[Flat, Future[None]] = {}
        self._norms: dict[nn.Parameter, Tensor] = {}
        self._stepping: Optimizer | None = None
        self._gate: Future[float] = finished(1.0)
        self._coefficient = Slab(4096, pin=copies.device.type == "cuda")
        self._clipped = False
        """Whether the norm of the step that has begun was taken: the gate opens when it is known."""
        self._lent = False
        self._closed = False
        self._stepper = Stepper()  # after all that may find no memory: its thread would stay
        self._where = {item.parameter: (flat, index) for flat in homes for index, item in enumerate(flat.slices)}
        for flat in homes:
            mark_streamed(flat.storage(), partial(self._stream.want, flat))
            for item in flat.slices:
                item.parameter.__class__ = StreamedParameter
        self._handles: list[RemovableHandle] = []
        self._restore: list[Callable[[], None]] = []
        for index, (modules, flats) in enumerate(units):
            if flats:
                self._hook_unit(index, modules)
        for flat in homes:
            for index, item in enumerate(flat.slices):
                hook = partial(self._landed, flat, index) if flat in rules else partial(self._refuse, item.name)
                wants = item.parameter.requires_grad
                item.parameter.requires_grad_(True)  # torch takes the hook of no other, and a frozen one may thaw
                self._handles.append(item.parameter.register_post_accumulate_grad_hook(hook))
                item.parameter.requires_grad_(wants)
        for optimizer in {id(optimizer): optimizer for optimizer, _ in groups.values()}.values():
            self._handles.append(optimizer.register_step_pre_hook(self._step_begins))
            self._handles.append(optimizer.register_step_post_hook(self._step_ends))
            self._handles.append(optimizer.register_state_dict_post_hook(self._add_states))
            self._handles.append(optimizer.register_load_state_dict_pre_hook(self._take_states))
            self._watch_zero_grad(optimizer)
        self._borrowed: dict[Flat, tuple[Opened, int]] = {}
        """Of flats whose parameters are whole on the CPU while a state dict is loaded: how many modules load."""
        for owner in module.modules():
            if self._streamed(owner):
                self._handles.append(owner._register_state_dict_hook(self._after_state_dict))
                self._handles.append(owner.register_load_state_dict_pre_hook(self._before_load))
                self._handles.append(owner.register_load_state_dict_post_hook(self._after_load))

    # ---- a micro-batch ----

    def begin(self, kind: Literal["train", "evaluate"]) -> None:
        """A forward begins, with a backward ("train") or without."""
        self._stream.begin(kind)

    def end_backward(self) -> None:
        """A backward has ended: what has landed is stepped, or summed up."""
        while self._leaving:
            self._let_go()
        for flat, gradient in self._gradients.items():
            if gradient.landings:
                self._expected[flat, _wants(flat)] = gradient.landings
                gradient.landings = 0
            if any(gradient.landed):
                if self._stepping is not None and not self._hold and self._groups[flat][0] is self._stepping:
                    self._launch(flat)
                else:
                    self._submit_sum(flat)

    def drain(self) -> None:
        """Returns when every step that has begun is made.

        Raises:
            Exception: what went wrong in one.
        """
        for gradient in self._gradients.values():
            gradient.settled.result()
        for home in self.homes.values():
            home.drain()

    def clip(self, optimizer: Optimizer, limit: float, algorithm: str) -> None:
        """Clips the gradients of `optimizer` as `torch.nn.utils.clip_grad_norm_` (or `_value_`) does.

        Args:
            optimizer: whose parameters.
            limit: the largest norm, or value.
            algorithm: "norm" or "value".
        """
        if self._stepping is optimizer and not self._hold and algorithm == "norm":
            self._clip_launched(optimizer, limit)
            return
        with self.lend_gradients():
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            if algorithm == "norm":
                torch.nn.utils.clip_grad_norm_(parameters, limit)
            else:
                torch.nn.utils.clip_grad_value_(parameters, limit)

    @contextlib.contextmanager
    def lend_gradients(self) -> Iterator[None]:
        """Gives every parameter that has left its master weights as `.data` and its gradient as `.grad`, on the CPU.

        What is changed there counts. Nested calls are the outermost one.
        """
        if self._lent:
            yield
            return
        with self._lend_weights():
            for flat, gradient in self._gradients.items():
                if any(gradient.landed):
                    self._submit_sum(flat)
            self.drain()
            lent = [
                (item, gradient, index)
                for flat, gradient in self._gradients.items()
                for index, item in enumerate(flat.slices)
            ]
            for item, gradient, index in lent:
                if gradient.summed[index]:
                    assert gradient.total is not None
                    item.parameter.grad = item.of(gradient.total)
            try:
                yield
            finally:
                for item, gradient, index in lent:
                    grad, item.parameter.grad = item.parameter.grad, None
                    gradient.summed[index] = grad is not None
                    gradient.summing = any(gradient.summed)
                    if grad is not None:
                        if gradient.total is None:
                            gradient.total = torch.zeros(gradient.landing.numel())
                        if grad.data_ptr() != item.of(gradient.total).data_ptr():
                            item.of(gradient.total).copy_(grad)

    @contextlib.contextmanager
    def _lend_weights(self) -> Iterator[None]:
        """Makes every parameter that has left a whole fp32 tensor on the CPU."""
        self.drain()
        self._stream.release_all()
        opened = {flat: home.open().result() for flat, home in self.homes.items()}
        self._lent = True
        try:
            for flat, values in opened.items():
                for item in flat.slices:
                    item.parameter.data = item.of(values.master)
            yield
        finally:
            self._lent = False
            for flat, values in opened.items():
                flat.attach()
                values.round()
                self.homes[flat].close(values, changed=True)

    def close(self) -> None:
        """Gives the parameters back, whole and on the CPU, and ends threads and hooks."""
        if self._closed:
            return
        self._closed = True
        for handle in self._handles:
            handle.remove()
        for parameter in self._where:
            parameter.__class__ = nn.Parameter
        for restore in self._restore:
            restore()
        with contextlib.ExitStack() as stack:  # from the last line up, each whatever happens to the others
            for home in self.homes.values():
                stack.callback(home.free)
            for gradient in self._gradients.values():
                stack.callback(gradient.free)
            stack.callback(self._coefficient.close)
            stack.callback(self._copies.close)
            stack.callback(self._give_back)
            for flat in self.homes:
                stack.callback(self._stream.release, flat)
            stack.callback(self._stepper.close)
            for gradient in self._gradients.values():  # steps that have begun are made
                stack.callback(wait, [gradient.settled])
            stack.callback(self._copies.drain)
            # Training failed between backward and step: the step is not made.
            if not self._clipped and not self._gate.done():
                self._gate.set_exception(RuntimeError("training ended before this optimizer step was made"))

    # ---- weights ----

    def _hook_unit(self, index: int, modules: Sequence[nn.Module]) -> None:
        def before(module: nn.Module, args: object) -> None:
            if not self._lent:
                self._stream.enter(index)

        def after(module: nn.Module, args: object, output: object) -> None:
            if not self._lent:
                self._stream.exit(index)

        for module in modules:
            self._handles.append(module.register_forward_pre_hook(before, prepend=True))
            self._handles.append(module.register_forward_hook(after, always_call=True))

    def _give_back(self) -> None:
        """Makes the parameters whole on the CPU, as the last step that was made left them."""
        for home in self.homes.values():
            with contextlib.suppress(Exception):  # a step that was not made; its weights are those before it
                home.drain()
            with contextlib.suppress(Exception):
                values = home.open().result()
                for item in home.flat.slices:
                    item.parameter.data = item.of(values.master).clone()
                home.close(values, changed=False)

    # ---- gradients ----

    def _watch_zero_grad(self, optimizer: Optimizer) -> None:
        """Makes the optimizer's `zero_grad` drop the gradients that have left, too."""
        zero_grad = optimizer.zero_grad

        def forget_and_zero_grad(*args: bool, **kwargs: bool) -> None:
            for flat, gradient in self._gradients.items():
                if self._groups[flat][0] is optimizer:
                    gradient.forget()
            zero_grad(*args, **kwargs)

        optimizer.zero_grad = forget_and_zero_grad  # type: ignore[method-assign]
        self._restore.append(partial(setattr, optimizer, "zero_grad", zero_grad))

    def _refuse(self, name: str, parameter: nn.Parameter) -> None:
        raise RuntimeError(
            f"{name} has a gradient, and was frozen or in no optimizer when training began. Give it to the optimizer "
            "from the start (`requires_grad` may change later), or set `states='gpu'`."
        )

    def _landed(self, flat: Flat, index: int, parameter: nn.Parameter) -> None:
        """autograd has accumulated a gradient: it leaves."""
        grad, parameter.grad = parameter.grad, None
        assert grad is not None
        if flat in self._launched:
            raise RuntimeError(
                f"a gradient of {flat.slices[index].name} arrived after the optimizer step of {flat.name} had begun: "
                "it is used differently from step to step. Set `overlap='none'`."
            )
        gradient = self._gradients[flat]
        if gradient.landed[index]:  # once more in one backward, as with reentrant checkpointing
            self._submit_sum(flat)
        if not any(gradient.landed):
            gradient.settled.result()
        gradient.landed[index] = True
        gradient.landings += 1
        complete = (
            self._stepping is not None
            and self._overlap != "none"
            and not self._hold
            and self._groups[flat][0] is self._stepping
            # Each once, and in the last backward, too: a gradient that comes in parts is complete at the end only.
            and gradient.landings == self._expected.get((flat, _wants(flat))) == sum(_wants(flat))
        )
        if self._clips and not gradient.summing:
            self._norms[parameter] = torch._foreach_norm([grad.float()])[0]
        if complete:
            self._stream.retire(flat)
        data = grad.detach().contiguous().view(-1).view(torch.uint8)
        mark = self._copies.out(data, gradient.target(index), self._copies.mark())
        gradient.mark = mark
        self._leave(data, mark)
        while self._leaving_bytes > self.WINDOW and len(self._leaving) > 1:
            self._let_go()
        if complete:
            self._launch(flat)

    def _leave(self, data: Tensor, mark: Mark) -> None:
        """Keeps device bytes alive until their copy out, whose mark is given, was made."""
        self._leaving.append((data, mark))
        self._leaving_bytes += data.numel()

    def _let_go(self) -> None:
        data, mark = self._leaving.popleft()
        self._leaving_bytes -= data.numel()
        self._copies.wait(mark)

    def _arrival(self, gradient: Gradient) -> "Future[None]":
        """Returns a future that is done when all that has left so far is on the host."""
        arrived: Future[None] = Future()
        self._copies.when_out(gradient.mark, partial(arrived.set_result, None))
        return arrived

    def _submit_sum(self, flat: Flat) -> "Future[None]":
        """Has what has landed added to what was summed up."""
        gradient = self._gradients[flat]
        landed, gradient.landed = gradient.landed, [False] * len(flat.slices)
        norms = self._clips

        def add() -> None:
            gradient.add(landed)
            if norms:
                assert gradient.total is not None
                for index, item in enumerate(flat.slices):
                    if gradient.summed[index]:
                        self._norms[item.parameter] = torch._foreach_norm([item.of(gradient.total)])[0]

        gradient.summing = True
        gradient.settled = self._stepper.submit(add, [self._arrival(gradient)])
        return gradient.settled

    # ---- the step ----

    def _step_begins(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """`optimizer.step` was called; its closure, if any, is still to run."""
        self._stepping = optimizer
        self._clipped = False
        self._gate = Future() if self._clips and not self._hold else finished(1.0)

    def _step_ends(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """`optimizer.step` has stepped what is on the device."""
        self.end_backward()  # of a user who called `loss.backward` without Lightning
        if not self._clipped and not self._gate.done():
            self._gate.set_result(1.0)
        for flat, gradient in self._gradients.items():
            if self._groups[flat][0] is optimizer and flat not in self._launched and gradient.summing:
                self._launch(flat)
        launched, self._launched = self._launched, {}
        self._stepping = None
        self._norms.clear()
        self._sums.clear()
        self._stream.renew()
        if self._overlap == "none":
            for done in launched.values():
                done.result()
        if launched:
            self._stream.prefetch()

    def _clip_launched(self, optimizer: Optimizer, limit: float) -> None:
        """Opens the gate with what `clip_grad_norm_` would multiply gradients with, once the device knows it."""
        for flat, gradient in self._gradients.items():
            if self._groups[flat][0] is optimizer:
                # What is summed on the host has its norm taken there. A launched step waits for the gate: not for it.
                sum_of_flat = self._sums.get(flat) if flat in self._launched else gradient.settled
                if sum_of_flat is not None:
                    sum_of_flat.result()
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        resident = [parameter for parameter in parameters if parameter.grad is not None]
        grads = [parameter.grad for parameter in resident if parameter.grad is not None]
        norms = dict(zip(resident, torch._foreach_norm(grads), strict=True)) if grads else {}
        device = self._copies.device
        every = [norm.to(device) for p in parameters if (norm := norms.get(p, self._norms.get(p))) is not None]
        if not every:
            return
        total = torch.linalg.vector_norm(torch.stack(every))
        coefficient = torch.clamp(limit / (total + 1e-6), max=1.0).float()
        if grads:
            torch._foreach_mul_(grads, coefficient)
        self._clipped = True
        gate, host = self._gate, self._coefficient.tensor
        data = coefficient.view(1).view(torch.uint8)
        mark = self._copies.out(data, host, self._copies.mark())
        self._leave(data, mark)
        self._copies.when_out(mark, lambda: gate.set_result(float(host[:4].view(torch.float32))))

    def _launch(self, flat: Flat) -> None:
        """Hands the step of `flat` to the CPU."""
        gradient, rule, home = self._gradients[flat], self._rules[flat], self.homes[flat]
        self._stream.retire(flat)
        optimizer, group = self._groups[flat]
        options = {name: value for name, value in optimizer.param_groups[group].items() if name != "params"}
        options = {name: value.item() if isinstance(value, Tensor) else value for name, value in options.items()}
        if gradient.summing:
            arrived = self._sums[flat] = self._submit_sum(flat) if any(gradient.landed) else gradient.settled
            landed = None
        else:
            arrived = self._arrival(gradient)
            landed, gradient.landed = gradient.landed, [False] * len(flat.slices)
        opened = home.open()
        gate = self._gate

        def step() -> None:
            values = opened.result()
            changed = False
            try:
                whole = gradient.landing if landed is not None else gradient.total
                assert whole is not None
                rule.step(options, values, whole, landed or gradient.summed, gate.result())
                changed = True
            finally:
                gradient.summed = [False] * len(flat.slices)
                home.close(values, changed=changed)

        gradient.summing = False
        done = self._stepper.submit(step, [arrived, gate, opened], priority=self._order[flat])
        gradient.settled = done
        home.reserve(done)
        self._launched[flat] = done

    # ---- checkpoints ----

    def _streamed(self, owner: nn.Module) -> list[tuple[str, nn.Parameter]]:
        """Returns the parameters of `owner` itself that have left, by their names in it."""
        return [
            (name, value) for name, value in owner._parameters.items() if value is not None and value in self._where
        ]

    def _after_state_dict(self, owner: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
        """Puts the master weights, copied, where the module has put what is on the device."""
        self._settle()
        for name, parameter in self._streamed(owner):
            if prefix + name in state:
                flat, index = self._where[parameter]
                with self._read(flat) as values:
                    state[prefix + name] = flat.slices[index].of(values.master).clone()

    def _before_load(self, owner: nn.Module, *_: object) -> None:
        """Makes the parameters of `owner` whole on the CPU, to be loaded into."""
        self._settle()
        for flat in {self._where[parameter][0]: None for _, parameter in self._streamed(owner)}:
            if flat in self._borrowed:
                values, loading = self._borrowed[flat]
            else:
                values, loading = self.homes[flat].open().result(), 0
                self._stream.release(flat)
                for item in flat.slices:
                    item.parameter.data = item.of(values.master)
            self._borrowed[flat] = (values, loading + 1)

    def _after_load(self, owner: nn.Module, keys: object) -> None:
        for flat in {self._where[parameter][0]: None for _, parameter in self._streamed(owner)}:
            values, loading = self._borrowed.pop(flat)
            if loading > 1:
                self._borrowed[flat] = (values, loading - 1)
                continue
            flat.attach()
            values.round()
            self.homes[flat].close(values, changed=True)

    def _add_states(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Adds, copied, the optimizer states of the parameters that have left."""
        self._settle()
        for number, flat, index in self._numbers(optimizer):
            with self._read(flat) as values:
                of_parameter = self._rules[flat].state_of(index, values)
                if of_parameter:
                    state["state"][number] = {
                        name: value.clone() if isinstance(value, Tensor) else value
                        for name, value in of_parameter.items()
                    }

    def _take_states(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Takes over, and out, the optimizer states of the parameters that have left."""
        self._settle()
        states = dict(state["state"])
        for number, flat, index in self._numbers(optimizer):
            values = self.homes[flat].open().result()
            self._rules[flat].load_state(index, states.pop(number, {}), values)
            self.homes[flat].close(values, changed=True)
        return {**state, "state": states}

    def _numbers(self, optimizer: Optimizer) -> Iterator[tuple[int, Flat, int]]:
        """Yields, of the optimizer's parameters that have left, the number in its state dict, and flat and index."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for number, parameter in enumerate(parameters):
            if parameter in self._where:
                yield number, *self._where[parameter]

    def _settle(self) -> None:
        if not self._lent:
            self.drain()

    @contextlib.contextmanager
    def _read(self, flat: Flat) -> Iterator[Opened]:
        values = self.homes[flat].open().result()
        try:
            yield values
        finally:
            self.homes[flat].close(values, changed=False)


def _wants(flat: Flat) -> tuple[bool, ...]:
    """Returns of each parameter whether it wants a gradient now."""
    return tuple(item.parameter.requires_grad for item in flat.slices)
