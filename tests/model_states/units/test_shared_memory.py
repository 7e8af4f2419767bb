"""Memory that parameters share with tensors of user code (`p.data = t`), against plain Lightning."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.support.access import PLACES, Toy, compare, fit
from tests.support.compare import assert_same

Operation = Callable[["Sharing", int, int], Any]


class Sharing(Toy):
    """A toy whose user code keeps tensors, arrays and aliases: `kept`."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.kept: list[Any] = []
        self.made = 0

    def weight(self, number: int) -> nn.Parameter:
        """Returns one of four weights of one shape: two are trained, and two are not."""
        owners = (self.blocks[0].up, self.target.up, self.blocks[1].down, self.target.down)
        return owners[number % 4].weight  # type: ignore[no-any-return]

    def fresh(self, count: int = 64) -> Tensor:
        self.made += 1
        return 0.3 * torch.randn(count, generator=torch.Generator().manual_seed(self.made))

    def choose(self, number: int, kind: Any = Tensor) -> Any:
        """Returns one of the kept objects of a kind; None: there is none."""
        found = [item for item in self.kept if isinstance(item, kind)]
        return found[number % len(found)] if found else None


def assign(module: Sharing, i: int, j: int) -> None:
    module.kept.append(module.fresh().view(8, 8))
    module.weight(i).data = module.kept[-1]


def assign_and_forget(module: Sharing, i: int, j: int) -> None:
    module.weight(i).data = module.weight(i).data * 0.5


def assign_kept(module: Sharing, i: int, j: int) -> None:
    if (tensor := module.choose(j)) is not None and tensor.numel() == 64:
        module.weight(i).data = tensor.view(8, 8)


def assign_array(module: Sharing, i: int, j: int) -> None:
    module.kept.append(module.fresh().view(8, 8).numpy().copy())
    module.weight(i).data = torch.from_numpy(module.kept[-1])


def assign_parts_of_a_buffer(module: Sharing, i: int, j: int) -> None:
    buffer = module.fresh(160)
    module.kept.append(buffer)
    module.weight(i).data = buffer[:64].view(8, 8)
    module.weight(j).data = buffer[80:144].view(8, 8)


def assign_without_effect(module: Sharing, i: int, j: int) -> None:
    module.weight(i).data = module.weight(i).data.to("cpu")


def share(module: Sharing, i: int, j: int) -> None:
    module.weight(i).data = module.weight(j).data


def swap(module: Sharing, i: int, j: int) -> None:
    p, q = module.weight(i), module.weight(j)
    p.data, q.data = q.data, p.data


def alias(module: Sharing, i: int, j: int) -> None:
    module.kept.append(module.weight(i).data if j % 2 else module.weight(i).detach())


def keep_array(module: Sharing, i: int, j: int) -> None:
    weight = module.weight(i).detach()
    module.kept.append(weight.t().numpy() if j % 2 else np.asarray(weight[:4]))


def write_tensor(module: Sharing, i: int, j: int) -> None:
    if (tensor := module.choose(i)) is not None:
        with torch.no_grad():
            tensor.mul_(0.5)
            tensor.view(-1)[j] += 0.25


def write_array(module: Sharing, i: int, j: int) -> None:
    if (array := module.choose(i, np.ndarray)) is not None:
        array[j % 8] -= 0.125


def write_weight(module: Sharing, i: int, j: int) -> None:
    with torch.no_grad():
        module.weight(i)[j % 8] += 0.25


def write_both(module: Sharing, i: int, j: int) -> None:
    if (tensor := module.choose(j)) is not None and tensor.numel() == 64:
        with torch.no_grad():
            torch._foreach_add_([module.weight(i), tensor.view(8, 8)], 0.25)


def load(module: Sharing, i: int, j: int) -> None:
    module.blocks[0].load_state_dict({name: 0.5 * value for name, value in module.target.state_dict().items()})


def keep_state_dict(module: Sharing, i: int, j: int) -> None:
    module.kept += module.target.up.state_dict().values()


def write_state_dict(module: Sharing, i: int, j: int) -> None:
    """The usual moving average over state dicts: nothing else refers to the tensors that are written."""
    new = module.blocks[i % 2].state_dict(keep_vars=j % 2 == 0)
    for name, value in module.target.state_dict(keep_vars=j % 3 == 0).items():
        value.mul_(0.75).add_(new[name].detach(), alpha=0.25)


def drop(module: Sharing, i: int, j: int) -> None:
    if module.kept:
        module.kept.pop(i % len(module.kept))


def write_and_drop(module: Sharing, i: int, j: int) -> None:
    write_tensor(module, i, j)
    if (tensor := module.choose(i)) is not None:
        module.kept = [item for item in module.kept if item is not tensor]


OPERATIONS: list[Operation] = [
    assign, assign_and_forget, assign_kept, assign_array, assign_parts_of_a_buffer, assign_without_effect, share, swap,
    alias, keep_array, write_tensor, write_array, write_weight, write_both, load, drop,
    write_and_drop, keep_state_dict, write_state_dict,
]  # fmt: skip
WRITES: list[Operation] = [write_tensor, write_array]
"""Those that plain training allows between a forward and its backward."""


def code(operations: list[Operation]) -> Any:
    return st.tuples(st.sampled_from(operations), st.integers(0, 3), st.integers(0, 7))


PROGRAMS = st.fixed_dictionaries(
    {
        "on_fit_start": st.lists(code(OPERATIONS), max_size=2),
        "on_train_batch_start": st.lists(code(OPERATIONS), max_size=3),
        "on_before_backward": st.lists(code(WRITES), max_size=1),
        "on_train_batch_end": st.lists(code(OPERATIONS), max_size=4),
    }
)
TRAININGS = st.fixed_dictionaries(
    {
        "gradient_clip_val": st.sampled_from([None, 0.05]),
        "accumulate_grad_batches": st.sampled_from([1, 2]),
        "precision": st.sampled_from(["32-true", "bf16-mixed"]),
    }
)


def run(path: Path, program: Any, training: Any, states: str | None) -> Sharing | RuntimeError:
    """Returns the trained module, or the error that training has ended with."""
    module = Sharing(momentum=0.5)
    for hook, operations in program.items():
        if not operations:
            continue

        def act(module: Any, operations: Any = operations) -> Any:
            seen = []
            for operation, i, j in operations:
                operation(module, i, j)
                if j % 2:
                    continue  # a read adopts changes: some are left to the next statement
                seen += [torch.tensor(item) if isinstance(item, np.ndarray) else item.clone() for item in module.kept]
                seen += [module.weight(number).detach().clone() for number in range(4)]
            return seen

        module.at(hook, act)
    try:
        fit(path, module, states, **training)
    except RuntimeError as error:
        return error
    module.seen += [torch.tensor(item) if isinstance(item, np.ndarray) else item.clone() for item in module.kept]
    return module


def check(path: Path, program: Any, training: Any, places: tuple[str, ...]) -> None:
    """Numbers are those of plain training, unless two parameters that share memory are stepped, which is refused."""
    plain = run(path, program, training, None)
    for states in places:
        found = run(path, program, training, states)
        if isinstance(found, RuntimeError):
            refused = ("share memory", "modified by an inplace operation")  # the second in mixed precision
            assert isinstance(plain, RuntimeError) or any(text in str(found) for text in refused), (found, plain)
        elif isinstance(plain, RuntimeError):
            # Memory that is no longer the weight's: in plain torch its alias still has the weight's version counter.
            assert "modified by an inplace operation" in str(plain), plain
        else:
            assert_same(found, plain)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(PROGRAMS, TRAININGS)
@example(
    {
        "on_fit_start": [],
        "on_train_batch_start": [],
        "on_before_backward": [(write_tensor, 0, 0)],
        "on_train_batch_end": [(alias, 2, 0), (assign, 2, 0)],
    },
    {"gradient_clip_val": None, "accumulate_grad_batches": 1, "precision": "32-true"},
)
@example(
    {
        "on_fit_start": [],
        "on_train_batch_start": [(keep_array, 0, 1), (keep_array, 2, 0)],
        "on_before_backward": [(write_array, 0, 2)],
        "on_train_batch_end": [(write_array, 1, 1), (drop, 0, 1)],
    },
    {"gradient_clip_val": None, "accumulate_grad_batches": 2, "precision": "bf16-mixed"},
)
def test_random_assignments(tmp_path: Path, program: Any, training: Any) -> None:
    """Parameters, and all tensors that share their memory, have the values of plain training after every statement."""
    check(tmp_path, program, training, ("host",))


@pytest.mark.thorough
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(PROGRAMS, TRAININGS)
def test_more_random_assignments(tmp_path: Path, program: Any, training: Any) -> None:
    check(tmp_path, program, training, PLACES)


def test_gradients_of_two_parameters_that_share_memory_are_refused(tmp_path: Path) -> None:
    """Each would be stepped from weights that the other's step has changed, in the optimizer's order."""

    def act(module: Any) -> None:
        module.blocks[0].up.weight.data = module.blocks[1].down.weight.data

    with pytest.raises(RuntimeError, match=r"blocks.0.up.weight and blocks.1.down.weight share memory.*one parameter"):
        fit(tmp_path, Toy("on_train_batch_end", act), "host")


def test_a_view_that_is_made_in_a_forward_shares_its_weight_afterwards(tmp_path: Path) -> None:
    """The memory that is fetched for the forward is freed when the weights are evicted."""

    class Sharing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            others[0].weight.data = self.weight.view(8, 8).detach()
            return super().forward(x)

    def make() -> Toy:
        module = Toy()
        others[:] = [module.target.down]
        module.blocks[0].up = Sharing(8, 8)
        return module

    others: list[nn.Linear] = []
    compare(tmp_path, make, "host")


def test_parameters_that_share_memory_before_training_are_refused(tmp_path: Path) -> None:
    module = Toy()
    module.blocks[0].up.weight.data = module.target.up.weight.data
    with pytest.raises(ValueError, match=r"blocks.0.up.weight and target.up.weight.*share memory.*one parameter"):
        fit(tmp_path, module, "host")


@pytest.mark.parametrize("states", PLACES)
def test_tensors_from_before_training_share_the_memory(tmp_path: Path, states: str) -> None:
    """An alias from before `fit` sees the steps, and writes to it change the weights, also after training."""
    runs = []
    for where in (states, None):
        module = Toy("on_train_batch_end", lambda module: module.alias.mul_(0.5).clone())
        buffer = torch.randn(80, generator=torch.Generator().manual_seed(2))
        module.__dict__["alias"] = buffer
        module.blocks[0].up.weight.data = buffer[:64].view(8, 8)
        fit(tmp_path, module, where)
        buffer[3] = 5
        runs.append(module)
    assert_same(*runs)


@pytest.mark.parametrize("states", PLACES)
def test_another_process_shares_the_memory(tmp_path: Path, states: str) -> None:
    """It maps the same file, so that no tensor of this process tells that the memory is used."""
    runs = []
    for where in (states, None):
        file = str(tmp_path / f"weights-{where}")
        Path(file).write_bytes(bytes(4 * 64))
        of_other = torch.from_file(file, shared=True, size=64)
        module = Toy("on_train_batch_end", lambda module, of_other=of_other: of_other.mul_(0.5).clone())
        with torch.no_grad():
            own = torch.from_file(file, shared=True, size=64).view(8, 8).copy_(module.blocks[0].up.weight)
        module.blocks[0].up.weight = nn.Parameter(own)
        module.blocks[1].share_memory()
        del own
        fit(tmp_path, module, where)
        module.seen += [of_other.clone(), *(parameter.is_shared() for parameter in module.parameters())]
        runs.append(module)
    assert_same(*runs)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end", "on_before_optimizer_step"])
@pytest.mark.parametrize(
    "convert",
    [
        lambda module: module.to("cpu"),
        lambda module: module.blocks.to(device="cpu", dtype=torch.float32, non_blocking=True),
        lambda module: module.float(),
        lambda module: module.cpu(),
    ],
)
def test_conversions_that_change_nothing(tmp_path: Path, convert: Any, hook: str) -> None:
    """They pass gradients through, too, whose values may be gone."""
    compare(tmp_path, lambda: Toy(hook, lambda module: convert(module) and None), "host")


SHARED: dict[str, Operation] = {
    "module": lambda module, i, j: module.share_memory(),
    "parameter": lambda module, i, j: module.weight(i).share_memory_(),
    "alias": lambda module, i, j: module.weight(i).data.share_memory_(),
    "gradient": lambda module, i, j: module.weight(i).grad.share_memory_(),  # type: ignore[union-attr]
}


@pytest.mark.parametrize("shared", SHARED)
def test_memory_is_not_moved_to_other_processes_in_a_training(tmp_path: Path, shared: str) -> None:
    """Torch would move the memory of a whole unit, which is freed and allocated again; that ended the process."""

    def act(module: Any) -> None:
        if module.global_step:
            with pytest.raises(RuntimeError, match="`share_memory_` would move .*Call it before `fit`"):
                SHARED[shared](module, 0, 0)

    fit(tmp_path, Sharing("on_before_optimizer_step", act), "host")


@pytest.mark.parametrize("states", PLACES)
def test_data_that_is_set_while_weights_are_whole(tmp_path: Path, states: str) -> None:
    """In `whole_weights()`, and by a module that loads its own state: the values are used, and the memory is shared."""

    class Loading(nn.Linear):
        def _load_from_state_dict(self, state_dict: Any, prefix: str, *_: Any) -> None:
            self.weight.data = state_dict[prefix + "weight"]
            self.bias.data.copy_(state_dict[prefix + "bias"])

    def act(module: Any) -> Any:
        loaded = {"weight": torch.full((8, 8), 0.01 * len(module.seen)), "bias": torch.ones(8)}
        whole = getattr(module.trainer.strategy, "whole_weights", nullcontext)
        with torch.no_grad():
            module.blocks[0].up.load_state_dict(loaded)
            loaded["weight"][0] += 1
            with whole():
                kept = torch.eye(8)
                module.blocks[1].up.weight.data = kept
                module.blocks[1].up.weight.add_(1)
                module.blocks[0].up.weight.mul_(2)
            kept[1] += 1
        module.kept = kept, loaded["weight"]
        return [*module.kept, module.blocks[1].up.weight.clone(), module.blocks[0].up.weight.clone()]

    def make() -> Any:
        module = Toy()
        module.blocks[0].up = Loading(8, 8)
        module.at("on_train_batch_end", act)
        module.at("on_train_batch_start", lambda module: [item.clone() for item in getattr(module, "kept", ())])
        return module

    compare(tmp_path, make, states)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("states", PLACES)
def test_tensors_of_state_dicts_are_those_of_the_parameters(tmp_path: Path, states: str, precision: Any) -> None:
    """A kept state dict has the values of later steps, and writes to its tensors count, as in plain torch."""

    def act(module: Any) -> Any:
        write_state_dict(module, 0, 1)
        if not module.kept:
            module.kept = list(module.state_dict().values())
        for value in module.kept:
            value.mul_(0.9)
        return [value.clone() for value in module.kept]

    compare(tmp_path, lambda: _kept("on_train_batch_end", act), states, precision=precision)


def test_a_state_dict_of_other_bits_than_the_weights(tmp_path: Path) -> None:
    """In `bf16-true` it has the fp32 master weights; it is one value with the weight all the same."""

    def act(module: Any) -> None:
        weight = module.blocks[0].up.weight
        kept = module.blocks[0].up.state_dict()["weight"]
        assert kept.dtype == torch.float32
        with torch.no_grad():
            kept.fill_(0.3)
            assert torch.equal(weight, torch.full_like(weight, 0.3))
            weight[0] = 2
        assert torch.equal(kept[0], torch.full((8,), 2.0)) and torch.equal(kept[1], torch.full((8,), 0.3))
        with pytest.raises(RuntimeError, match="while a state dict has its values"):
            module.blocks[1].up.weight.data = weight.data

    fit(tmp_path, Toy("on_train_batch_end", act), "host", precision="bf16-true")


@pytest.mark.parametrize("states", PLACES)
def test_compiled_code_reads_what_was_written_to_a_state_dict(tmp_path: Path, states: str) -> None:
    def make() -> Toy:
        module = Toy("on_train_batch_end", lambda module: write_state_dict(module, 1, 1))
        module.blocks.append(module.target)
        for block in module.blocks:
            block.compile(backend="aot_eager")
        return module

    compare(tmp_path, make, states)


def _kept(hook: str, act: Any) -> Sharing:
    module = Sharing(momentum=0.5)
    module.at(hook, act)
    return module


def test_a_tensor_that_is_assigned_is_not_kept_alive(tmp_path: Path) -> None:
    """Its memory is freed with its last reference, and the parameter is an ordinary offloaded one again."""

    def act(module: Any) -> Any:
        weight = module.blocks[0].up.weight
        values = weight.data * 0.5
        weight.data = values
        storage = StorageWeakRef(values.untyped_storage())
        del values
        flat_params = [parameter.flat for parameter in module.parameters() if hasattr(parameter, "flat")]
        float(weight.detach().sum())
        return [flat_params == [] or storage.expired(), any(flat.shared for flat in flat_params)]

    compare(tmp_path, lambda: Toy("on_train_batch_end", act), "host")


EXPORTS: dict[str, Callable[[nn.Parameter], Any]] = {
    "numpy": lambda weight: weight.detach().numpy(),
    "a part": lambda weight: weight.data[2:4].t().numpy(),
    "force": lambda weight: weight.numpy(force=True),
    "asarray": lambda weight: np.asarray(weight.detach()),
    "dlpack": lambda weight: torch.from_dlpack(weight.detach()),
}


@pytest.mark.parametrize("export", EXPORTS)
def test_arrays_have_the_memory_of_their_weight(tmp_path: Path, export: str) -> None:
    """They follow optimizer steps, and writes to them count, as long as they exist; then the memory is freed."""

    def read(module: Any) -> Any:
        weight = module.blocks[0].up.weight
        if module.global_step == 1:
            module.kept = np.asarray(EXPORTS[export](weight))
        elif module.global_step == 2:
            module.kept[1] *= 0.5
            values = torch.tensor(module.kept)
            module.kept = None
            return values
        float(weight.detach().sum())
        shared = [parameter.flat.shared for parameter in module.parameters() if hasattr(parameter, "flat")]
        return None if module.kept is None else torch.tensor(module.kept), module.kept is None and any(shared)

    def make() -> Any:
        module = Toy("on_train_batch_end", read)
        module.kept = None
        return module

    compare(tmp_path, make, "host", max_epochs=2)


def test_an_array_of_a_gradient_is_a_copy_with_a_warning(tmp_path: Path) -> None:
    def act(module: Any) -> None:
        with pytest.warns(UserWarning, match="of an offloaded gradient gives a copy"):
            array = module.blocks[0].up.weight.grad.numpy()
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1

    fit(tmp_path, Toy("on_before_optimizer_step", act), "host")


@pytest.mark.parametrize("states", PLACES)
def test_shared_memory_is_moved_with_its_parameter(tmp_path: Path, states: str) -> None:
    """A parameter group that is added divides flat parameters anew."""

    def act(module: Any) -> Any:
        if not hasattr(module, "kept"):
            module.kept = torch.eye(8)
            module.blocks[0].up.weight.data = module.kept
            module.target.requires_grad_(True)
            module.optimizers().add_param_group({"params": list(module.target.parameters()), "lr": 0.2})
        module.kept[2] += 0.5
        return module.kept.clone()

    compare(tmp_path, lambda: Toy("on_train_batch_start", act), states)


class AssignsBeforeBackward(Toy):
    """In plain torch, backward reads the assigned values for some operators, and the earlier ones for others."""

    def on_before_backward(self, loss: Tensor) -> None:
        weight = self.blocks[1].up.weight
        weight.data = weight.data * 0.5


@pytest.mark.parametrize("states", PLACES)
def test_an_assignment_between_forward_and_backward_is_refused(tmp_path: Path, states: str) -> None:
    with pytest.raises(
        RuntimeError, match=r"blocks\.1\.up\.weight, which is offloaded.*`.data`.*on_before_optimizer_step"
    ):
        fit(tmp_path, AssignsBeforeBackward(), states)
