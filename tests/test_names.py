"""Names that the field has a standard term for do not come back."""

import ast
import io
import tokenize
from collections.abc import Iterable, Mapping
from pathlib import Path

import lightning_ssd
from lightning_ssd.device import storage_tags

PACKAGE = Path(lightning_ssd.__file__).parent

STANDARD = {
    "AdamRule": "AdamOptimizer",
    "Busy": "WorkCounter",
    "CacheStats": "OffloadStats",
    "Copies": "CopyEngine",
    "Director": "PlanMode",
    "ElementwiseRule": "ElementwiseOptimizer",
    "Flat": "FlatParameter",
    "ForwardMode": "UnitDispatchMode",
    "Gate": "GradScaleDecision",
    "Home": "StateStore",
    "HostPlace": "HostBuffer",
    "LATE": "EVICT_MARGIN",
    "LandingMemory": "GradientPool",
    "LaunchCosts": "HostOverhead",
    "Leftover": "PendingFree",
    "Masters": "MasterWeights",
    "Opened": "StagedState",
    "OwnStepRule": "GenericOptimizer",
    "Places": "MemoryPlan",
    "Recorder": "TraceMode",
    "SSDPlace": "SSDBuffer",
    "SavedView": "SavedHandle",
    "Scratch": "StateStaging",
    "ScratchTier": "SSDTierBase",
    "SendAll": "OffloadAll",
    "SendIfShort": "OffloadOnPressure",
    "Settled": "FixedPlacement",
    "Slice": "ParamView",
    "TensorCache": "ActivationOffloader",
    "TierName": "OffloadTierName",
    "Transients": "TransientMemory",
    "Unborn": "MetaTensors",
    "Viewed": "RefCountedBytes",
    "Visit": "UnitCall",
    "WeightStream": "ParamPrefetcher",
    "Where": "InputChoice",
    "find_tensor_cache": "find_offloader",
    "leaving_parameters": "offloaded_parameters",
    "lend_gradients": "full_grads",
    "lend_weights": "summon_full_params",
    "make_copies": "make_copy_engine",
    "make_program": "make_schedule",
    "measure_launches": "measure_host_overhead",
    "out_done": "on_d2h",
    "rule_for": "make_flat_optimizer",
    "take_off_meta": "meta_to_placeholder",
    "tensor_cache": "offloader",
    "when_in": "on_h2d",
    "when_out": "on_d2h",
}
"""Of names that were used once, the standard ones."""

OF_MODEL_STATES = {
    "LaidOut": "FlatSpec",
    "LeftStates": "ModelRestorer",
    "StepTerms": "Setup",
    "_bring": "_copy_to_device",
    "_entered": "_forwards",
    "_fetch": "_prefetch_unit",
    "_has_left": "_has_offloaded",
    "_landed": "_on_grad_ready",
    "_leaving": "_offloaded",
    "_put_in": "_replace_in_groups",
    "_streams": "_offloads",
    "_unborn": "_uninitialized",
    "born_together": "init_groups",
    "choose_places": "plan_memory",
    "early": "speculative",
    "fetch": "unshard",
    "flats": "flat_params",
    "give_back": "release",
    "guess": "speculated",
    "hold": "defer_to_user_hooks",
    "hold_next": "defer_next",
    "laid_out": "specs",
    "landed": "arrived",
    "late": "deferred",
    "lay_out": "make_spec",
    "leaving": "offloaded",
    "make_flats": "make_flat_params",
    "make_scratch": "make_staging",
    "naive": "serial",
    "opened": "staged",
    "places": "memory_plan",
    "refuse_fetch": "refuse_unshard",
    "release_all": "evict_all",
    "renew": "reset",
    "retire": "retire_for_step",
    "rule": "flat_optimizer",
    "rules": "flat_optimizers",
    "scratch": "staging",
    "settle": "drain",
    "settled": "consumed",
    "slices": "param_views",
    "streaming_precision": "offload_precision",
    "take": "reserve",
    "take_in": "load",
    "take_over": "set_extra_state",
    "taken": "reserved",
    "turn": "flip",
    "unborn": "uninitialized",
    "wanted": "requested",
    "window": "param_staging",
}
"""The same for `model_states` and the files that use it, where other folders have other meanings of these names."""

MODEL_STATES = [*(PACKAGE / "model_states").glob("*.py"), *(PACKAGE / name for name in ("strategy.py", "precision.py"))]


def check_names(files: Iterable[Path], standard: Mapping[str, str]) -> None:
    for file in sorted(files):
        for token in tokenize.generate_tokens(io.StringIO(file.read_text()).readline):
            if token.type == tokenize.NAME and token.string in standard:
                raise AssertionError(f"{file}:{token.start[0]}: {token.string} is {standard[token.string]}")


def test_standard_names_are_used() -> None:
    check_names(PACKAGE.rglob("*.py"), STANDARD)
    check_names(MODEL_STATES, OF_MODEL_STATES)


def test_attributes_of_storages_are_named_in_one_file() -> None:
    """Two modules that chose the same name would read each other's values."""
    tags = {name: value for name, value in vars(storage_tags).items() if name.isupper()}
    assert len(set(tags.values())) == len(tags) > 10
    assert all(f"| `{name}` |" in (storage_tags.__doc__ or "") for name in tags)
    for file in sorted(PACKAGE.rglob("*.py")):
        if file.name != "storage_tags.py":
            for node in ast.walk(ast.parse(file.read_text())):
                text = node.value if isinstance(node, ast.Constant) else None
                assert not (isinstance(text, str) and text.startswith("_lightning_ssd_")), f"{file}:{node.lineno}"  # type: ignore[attr-defined]
