"""Names that the field has a standard term for do not come back."""

import io
import tokenize
from pathlib import Path

import lightning_ssd

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
    "HostPlace": "HostBuffer",
    "LATE": "EVICT_MARGIN",
    "LandingMemory": "GradientPool",
    "LaunchCosts": "HostOverhead",
    "Leftover": "PendingFree",
    "Masters": "MasterWeights",
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


def test_standard_names_are_used() -> None:
    for file in sorted(PACKAGE.rglob("*.py")):
        for token in tokenize.generate_tokens(io.StringIO(file.read_text()).readline):
            if token.type == tokenize.NAME and token.string in STANDARD:
                raise AssertionError(f"{file}:{token.start[0]}: {token.string} is {STANDARD[token.string]}")
