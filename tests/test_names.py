"""The package uses the field's standard terms."""

import ast
import io
import tokenize
from collections.abc import Iterable, Mapping
from pathlib import Path

import lightning_ssd
from lightning_ssd import storage_tags

PACKAGE = Path(lightning_ssd.__file__).parent
ROOT = Path(__file__).parents[1]

STANDARD = {
    "AdamRule": "AdamOptimizer",
    "Busy": "WorkCounter",
    "CacheStats": "OffloadStats",
    "Candidate": "SearchPoint or SwapCandidate",
    "Copies": "CopyEngine",
    "Director": "PlanMode",
    "ElementwiseRule": "ElementwiseOptimizer",
    "Flat": "FlatParameter",
    "ForwardMode": "UnitDispatchMode",
    "Gate": "GradScaleDecision",
    "Home": "StateStore",
    "HostPlace": "HostBuffer",
    "Kept": "InlineSaved or StoreManifest",
    "LATE": "EVICT_MARGIN",
    "LandingMemory": "GradientPool",
    "LaunchCosts": "HostOverhead",
    "Leftover": "PendingFree",
    "Masters": "MasterWeights",
    "Opened": "StagedState",
    "OwnStepRule": "GenericOptimizer",
    "Placement": "PlacementPolicy",
    "Places": "MemoryPlan",
    "Record": "SavedStorage or CommitRecord",
    "Recorder": "TraceMode",
    "SETTLING": "WARMUP_AFTER_CHANGE",
    "SSDPlace": "SSDBuffer",
    "SavedView": "SavedHandle",
    "Scratch": "StateStaging",
    "ScratchTier": "SSDTierBase",
    "SendAll": "OffloadAll",
    "SendIfShort": "OffloadOnPressure",
    "Settled": "FixedPlacement",
    "Stores": "StoreTrial",
    "Slice": "ParamView",
    "TensorCache": "ActivationOffloader",
    "TierName": "OffloadTierName",
    "Transients": "TransientMemory",
    "Unborn": "MetaTensors",
    "Viewed": "RefCountedBytes",
    "Visit": "UnitCall",
    "WeightStream": "ParamPrefetcher",
    "Where": "InputChoice",
    "_Lane": "CopyStream or IOQueue",
    "_Loader": "_ReplayLoader",
    "_Place": "_DataPosition",
    "_leaving": "_to_offload or _being_freed",
    "_left_to_fragments": "_fragment_reserve",
    "_part": "_segment",
    "_settled": "_converged or _expected_until",
    "_take": "a verb, such as allocate or pick",
    "_take_peak": "_pop_peak",
    "_turn": "_on_unit_event or _begin_launches",
    "_unborn": "_uninitialized",
    "again": "recomputable",
    "assemble_plan": "build_plan",
    "begin_part": "begin_segment",
    "born_together": "init_groups",
    "bring_back": "recompute",
    "bytes_that_may_leave": "offloadable_bytes",
    "chain": "recompute_ops",
    "chains": "recompute_ops",
    "correct": "calibrate",
    "director": "plan_mode",
    "find_lifts": "find_what_ifs",
    "find_tensor_cache": "find_offloader",
    "foretold": "predicted",
    "give_back": "unstage or free",
    "go_back": "fast_forward",
    "hidden_tokens": "breakeven_tokens",
    "host_first": "host_then_ssd",
    "host_room": "host_limit",
    "inbound": "is_unit_input",
    "keeps": "is_early or must_keep",
    "landed": "arrived",
    "launched": "submitted or launch_seconds",
    "leaving": "offloading",
    "leaving_parameters": "offloaded_parameters",
    "lend_gradients": "full_grads",
    "lend_weights": "summon_full_params",
    "let_go": "release",
    "make_copies": "make_copy_engine",
    "make_program": "make_schedule",
    "measure_launches": "measure_host_overhead",
    "open_cache": "open_offloader",
    "out_done": "on_d2h",
    "pace": "slowdown or seconds per unit",
    "place": "tiers_for, allocate or position",
    "published": "papers",
    "repeatable": "deterministic",
    "rule_for": "make_flat_optimizer",
    "safest_plan": "min_memory_plan",
    "sending_seconds": "offload_seconds",
    "settle": "drain",
    "settled": "issued, fixed_placement or converged",
    "stays": "kept",
    "stays_again": "needs_no_record",
    "streaming_precision": "offload_precision",
    "take": "allocate, pick, materialize or record",
    "take_in": "load_lazy",
    "take_initial_values": "pop_initial_values",
    "take_off_meta": "meta_to_placeholder",
    "take_over": "adopt",
    "take_up": "resume",
    "tensor_cache": "offloader",
    "times_back": "num_restores",
    "turn": "backward_start, _lock or flip",
    "visit": "unit_call",
    "visit_name": "unit_call_name",
    "visits": "unit_calls",
    "want": "on_unpacked, first_use or touch",
    "wanted_early": "needed_early",
    "when_in": "on_h2d",
    "when_out": "on_d2h",
}
"""Replaced names, each with the standard term."""

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

ORDINARY = {"again", "chain", "correct", "director", "pace", "place", "published", "take", "turn", "want"}
"""Names of `STANDARD` that tests and benchmarks may use for other things, such as a chain of operators."""

MODEL_STATES = [*(PACKAGE / "model_states").glob("*.py"), *(PACKAGE / name for name in ("strategy.py", "precision.py"))]


def check_names(files: Iterable[Path], standard: Mapping[str, str]) -> None:
    for file in sorted(files):
        for token in tokenize.generate_tokens(io.StringIO(file.read_text()).readline):
            if token.type == tokenize.NAME and token.string in standard:
                raise AssertionError(f"{file}:{token.start[0]}: {token.string} is {standard[token.string]}")


def test_standard_names_are_used() -> None:
    check_names(PACKAGE.rglob("*.py"), STANDARD)
    check_names(MODEL_STATES, OF_MODEL_STATES)
    others = {name: word for name, word in STANDARD.items() if name not in ORDINARY}
    check_names([*(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")], others)


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
