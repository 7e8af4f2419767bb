"""What a recipe would take on a machine, before any step: `lightning-ssd plan`."""

from pathlib import Path
from typing import Any

from lightning_ssd.planning import HardwareProfile, ModelProfile, transformer_profile

_KNOWN = "lightning_ssd.models.GPT"


def profile_recipe(config: Any, hardware: HardwareProfile) -> ModelProfile:
    """Returns the profile of what a recipe trains, by calculation.

    Args:
        config: the recipe as LightningCLI has parsed it, for `fit`.
        hardware: gives the times.

    Raises:
        ValueError: nothing is known of the model but by running it.
    """
    model, data, trainer = config["model"], config["data"], config["trainer"]
    if model["class_path"] != _KNOWN:
        raise ValueError(
            f"`plan` calculates profiles of {_KNOWN}, and the recipe has {model['class_path']}. Give the profile of "
            "another model with `--profile FILE.json`: the callback ModelProfiler measures it."
        )
    sizes, batches = model["init_args"], data["init_args"]
    if sizes["pretrained"]:
        sizes = _pretrained(Path(sizes["pretrained"]))
    accumulate = trainer["accumulate_grad_batches"]
    return transformer_profile(
        hardware,
        hidden=sizes["n_embd"],
        layers=sizes["n_layer"],
        heads=sizes["n_head"],
        sequence=batches["block_size"],
        batch=batches["batch_size"],
        vocabulary=sizes["vocab_size"],
        micro_batches=accumulate,
        clip_norm=bool(trainer["gradient_clip_val"]) and trainer["gradient_clip_algorithm"] != "value",
        tied=True,
    )


def _pretrained(folder: Path) -> Any:
    import json

    try:
        return json.loads((folder / "config.json").read_text())
    except FileNotFoundError as error:
        raise ValueError(f"`model.pretrained` is {str(folder)!r}, and there is no config.json in it.") from error
