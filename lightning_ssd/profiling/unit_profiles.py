"""Profiles of a model's units, made from the graph of a recorded forward and backward."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_ssd.activations import ForwardGraph, Interval, Saved, UnitCall
from lightning_ssd.model_states import Unit
from lightning_ssd.planning import OperatorProfile, PartProfile, UnitProfile, unit_call_name

REST = "rest"
"""Name of the operator that sums the operations of a unit whose results are not saved."""


def unit_profiles(
    units: Sequence[Unit],
    graph: ForwardGraph,
    saved: Sequence[Saved],
    launches: Mapping[UnitCall, float],
    parts_of: Callable[[Unit], Sequence[PartProfile]],
    *,
    allow_recompute: bool,
) -> tuple[UnitProfile, ...]:
    """Returns the profiles of calls of units, in the order of the forward; then units that were not called.

    Args:
        saved: saved tensors of the graph that may be offloaded.
        launches: host seconds to launch the operations of each call.
        parts_of: returns the profiles of a unit's parts, one or more.
        allow_recompute: whether units may be checkpointed.
    """
    measured = graph.transients.measure()
    checkpoint_bytes = graph.checkpoint_bytes() if allow_recompute else {}
    arguments = graph.lone_arguments()
    profiles = []
    for unit_call in calls_of_units(units, graph):
        parts = parts_of(units[unit_call.unit]) if unit_call.call_index == 0 else ()
        of_call = [item for item in saved if item.unit_call == unit_call]
        name = unit_call_name(units[unit_call.unit].name, unit_call.call_index)
        profile = _unit_profile(graph, unit_call, name, of_call, launches.get(unit_call, 0.0), parts, *measured)
        cast_bytes = graph.cast_bytes.get(unit_call, 0)
        of_checkpoint = checkpoint_bytes.get(unit_call)
        lone = arguments.get(unit_call, ()) if of_checkpoint is not None else ()
        profiles.append(
            replace(
                profile,
                checkpoint_bytes=of_checkpoint,
                argument_bytes=sum(graph.buffers[number].nbytes for number in lone),
                cast_bytes=cast_bytes,
                reruns=of_checkpoint is None and unit_call.unit in graph.rerun,
            )
        )
    return tuple(profiles)


def calls_of_units(units: Sequence[Unit], graph: ForwardGraph) -> list[UnitCall]:
    """Returns the calls of units in the order of the forward, then a call 0 of each unit that was not called.

    Every unit has a call 0, to which its weights belong, also if only a later one has operations: parameters that two
    modules share are a unit of both, and operations of the first module may belong to a unit inside of it.
    """
    calls: list[UnitCall] = []
    begun: set[int] = set()
    for unit_call in graph.unit_calls():
        if unit_call.unit not in begun and unit_call.call_index > 0:
            calls.append(UnitCall(unit_call.unit, 0))
        begun.add(unit_call.unit)
        calls.append(unit_call)
    return calls + [UnitCall(index, 0) for index in range(len(units)) if index not in begun]


def _unit_profile(
    graph: ForwardGraph,
    unit_call: UnitCall,
    name: str,
    saved: Sequence[Saved],
    launch_seconds: float,
    parts: Sequence[PartProfile],
    in_forward: Mapping[Interval, int],
    when_read: Mapping[int, int],
    in_backward: Mapping[Interval, int],
) -> UnitProfile:
    """Returns the profile of a call, from its launch time and the results of `TransientMemory.measure`."""
    operations = graph.operations
    remaining = {number for number, operation in enumerate(operations) if operation.unit_call == unit_call}
    forward = sum(operations[number].seconds for number in remaining)
    backward = graph.backward_seconds.get(unit_call, 0.0)
    launch = launch_seconds / len(remaining) if remaining else 0.0
    operators = []

    def add(name: str, made_by: set[int], **of_saved: Any) -> None:
        own = made_by & remaining
        seconds = sum(operations[number].seconds for number in own)
        operators.append(
            OperatorProfile(
                name,
                forward_seconds=seconds,
                backward_seconds=backward * seconds / forward if forward else 0.0,
                flops=sum(operations[number].flops for number in own),
                operations=len(own),
                launch_seconds=launch * len(own),
                **of_saved,
            )
        )
        remaining.difference_update(made_by)

    inputs = [item for item in saved if item.is_unit_input]
    for item in saved:
        if item.is_unit_input:
            continue
        maker = graph.buffers[item.buffer].maker
        assert maker is not None
        made_by = set(item.recompute_ops) or {maker}
        add(
            item.name,
            made_by,
            saved_bytes=item.nbytes,
            tensors=(item.name,),
            recompute_seconds=sum(operations[number].seconds for number in made_by) if item.recomputable else None,
            recompute_bytes=item.recompute_workspace_bytes,
            forward_bytes=in_forward.get((unit_call, item.buffer), 0),
            first_use_bytes=when_read.get(item.buffer, 0),
            backward_bytes=in_backward.get((unit_call, item.buffer), 0),
            recompute_operations=len(made_by) if item.recomputable else 0,
        )
    add(REST, set(remaining), saved_bytes=0)
    return UnitProfile(
        name,
        tuple(operators),
        input_bytes=sum(item.nbytes for item in inputs),
        parameters=sum(part.parameters for part in parts),
        weight_bytes=sum(part.weight_bytes for part in parts),
        gradient_bytes=sum(part.gradient_bytes for part in parts),
        state_bytes_read=sum(part.state_bytes_read for part in parts),
        state_bytes_written=sum(part.state_bytes_written for part in parts),
        resident_extra_bytes=sum(part.resident_extra_bytes for part in parts),
        casts=any(part.casts for part in parts),
        forward_bytes=in_forward.get((unit_call, None), 0),
        backward_bytes=max(in_backward.get((unit_call, number), 0) for number in (None, *(i.buffer for i in inputs))),
        parts=tuple(parts) if len(parts) > 1 else (),
    )
