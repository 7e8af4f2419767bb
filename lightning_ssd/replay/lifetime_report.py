"""Teraio's characterisation of a training step, as text and as figures, from the lifetimes of its tensors."""

from pathlib import Path
from typing import Any

from lightning_ssd.planning import HardwareProfile
from lightning_ssd.replay.lifetime_profile import CLASSES, PHASES, LifetimeProfile
from lightning_ssd.sizes import format_bytes, format_seconds
from lightning_ssd.timeline import PHASE_COLORS

PAPER_BANDWIDTH = 6.5e9
"""Bytes/s of one SSD in Teraio's paper, for the line of its figure 2."""

SMALL, LARGE = 10 * 10**6, 10**9
"""Smallest and largest bytes of the tensors that most of the paper's statements describe."""

SHORTEST = 1e-9
"""Seconds of the shortest drawn inactive period: shorter ones are rounding errors of sums of seconds."""

COLORS = {
    "weight": "#1f77b4",
    "gradient": "#c0392b",
    "optimizer state": "#8c6d1f",
    "saved tensor": "#2a7f3f",
    "transient": "#8a8a8a",
    "communication buffer": "#17a2b8",
}


def active_share(lifetimes: LifetimeProfile, gpu_bytes: int) -> tuple[float, float]:
    """Returns the mean and the maximum over operators of the share of GPU memory that an operator's tensors have."""
    active = lifetimes.active
    return sum(active) / len(active) / gpu_bytes, max(active) / gpu_bytes


def migratable_share(lifetimes: LifetimeProfile, bandwidth: float = PAPER_BANDWIDTH) -> float:
    """Returns the share of inactive periods, of tensors of 10 MB to 1 GB, that are longer than the tensor's migration.

    Args:
        bandwidth: bytes/s of the migration to a drive.
    """
    of_size = _characterised(lifetimes)
    return sum(seconds > nbytes / bandwidth for nbytes, seconds in of_size) / len(of_size) if of_size else 0.0


def _characterised(lifetimes: LifetimeProfile) -> list[tuple[int, float]]:
    """Returns bytes and seconds of the inactive periods of tensors of 10 MB to 1 GB."""
    sizes = ((lifetimes.tensors[period.tensor].nbytes, period.seconds) for period in lifetimes.periods)
    return [(nbytes, seconds) for nbytes, seconds in sizes if SMALL <= nbytes <= LARGE]


def median_period(lifetimes: LifetimeProfile) -> float:
    """Returns the median seconds of the inactive periods of tensors of `SMALL` bytes or more; 0 if there are none."""
    found = sorted(period.seconds for period in lifetimes.periods if lifetimes.tensors[period.tensor].nbytes >= SMALL)
    return found[len(found) // 2] if found else 0.0


def describe_lifetimes(lifetimes: LifetimeProfile, hardware: HardwareProfile) -> str:
    """Returns a summary of the profile, with the quantities of the paper's statements."""
    mean, most = active_share(lifetimes, hardware.gpu_bytes)
    periods = "no tensor of 10 MB to 1 GB has one"
    if _characterised(lifetimes):
        periods = (
            f"of tensors of 10 MB to 1 GB, {migratable_share(lifetimes):.0%} are longer than a migration at "
            f"{PAPER_BANDWIDTH / 1e9:g} GB/s, {migratable_share(lifetimes, hardware.ssd_write):.0%} than one to this "
            f"machine's drives; median {format_seconds(median_period(lifetimes))} of tensors of 10 MB or more"
        )
    return "\n".join(
        [
            lifetimes.describe(),
            f"active tensors         {mean:.2%} of {format_bytes(hardware.gpu_bytes)} on average over operators, "
            f"{most:.1%} at most",
            f"inactive periods       {periods}",
        ]
    )


def save_lifetimes(lifetimes: LifetimeProfile, hardware: HardwareProfile, folder: Path) -> list[Path]:
    """Writes `lifetimes.json` and the pictures `active.png`, `inactive.png` and `memory.png`.

    Args:
        hardware: machine; its memory and bandwidths are drawn.
        folder: directory; it is made if it does not exist.

    Returns:
        The files; without matplotlib, that of the lifetimes alone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / name for name in ("lifetimes.json", "active.png", "inactive.png", "memory.png")]
    lifetimes.to_json(files[0])
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return files[:1]
    for path, draw in zip(files[1:], (draw_active, draw_inactive, draw_memory), strict=True):
        figure = Figure(figsize=(9, 4))  # without pyplot, which would change the user's backend and figures
        draw(figure.subplots(), lifetimes, hardware)
        figure.tight_layout()
        figure.savefig(path, dpi=110, format="png")
    return files


def draw_active(axes: Any, lifetimes: LifetimeProfile, hardware: HardwareProfile) -> None:
    """Draws the share of GPU memory that the tensors of each operator have (Teraio, figure 1)."""
    shares = [100 * nbytes / hardware.gpu_bytes for nbytes in lifetimes.active]
    axes.plot(range(len(shares)), shares, linewidth=0.5, color="#1f77b4")
    first = 0
    for phase in PHASES:
        count = sum(one.phase == phase for one in lifetimes.operators)
        axes.axvspan(first, first + count, color=PHASE_COLORS[phase], linewidth=0, label=phase)
        first += count
    mean, most = active_share(lifetimes, hardware.gpu_bytes)
    axes.set_title(f"{lifetimes.name}: active tensors, {mean:.1%} on average, {most:.1%} at most", fontsize=9)
    axes.set_xlabel("operator")
    axes.set_ylabel("% of GPU memory")
    axes.legend(fontsize=7)


def draw_inactive(axes: Any, lifetimes: LifetimeProfile, hardware: HardwareProfile) -> None:
    """Draws inactive periods against tensor sizes, with lines of the bytes that drives and link migrate in a period."""
    for kind in CLASSES:
        of_kind = [
            (period.seconds, lifetimes.tensors[period.tensor].nbytes)
            for period in lifetimes.periods
            if lifetimes.tensors[period.tensor].kind == kind and period.seconds >= SHORTEST
        ]
        if of_kind:
            axes.scatter(*zip(*of_kind, strict=True), s=3, color=COLORS[kind], label=kind, linewidths=0)
    seconds = [SHORTEST, max(1.0, lifetimes.step_seconds)]
    lines = {
        f"{PAPER_BANDWIDTH / 1e9:g} GB/s": (PAPER_BANDWIDTH, "-"),
        f"PCIe, {hardware.copy_out / 1e9:.0f} GB/s": (hardware.copy_out, "--"),
        f"drives here, {hardware.ssd_write / 1e9:.1f} GB/s": (hardware.ssd_write, ":"),
    }
    for label, (bandwidth, style) in lines.items():
        axes.plot(seconds, [bandwidth * one for one in seconds], style, color="black", linewidth=0.8, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(bottom=1e3, top=2 * max(tensor.nbytes for tensor in lifetimes.tensors))
    axes.set_title(
        f"{lifetimes.name}: of tensors of 10 MB to 1 GB, {migratable_share(lifetimes):.0%} of the inactive periods are "
        "longer than a migration at 6.5 GB/s",
        fontsize=9,
    )
    axes.set_xlabel("inactive period, seconds")
    axes.set_ylabel("bytes of the tensor")
    axes.legend(fontsize=7, loc="lower right")


def draw_memory(axes: Any, lifetimes: LifetimeProfile, hardware: HardwareProfile) -> None:
    """Draws the bytes of each class over a step, and the GPU's capacity."""
    starts = [one.start for one in lifetimes.operators]
    kinds = [kind for kind in CLASSES if any(lifetimes.memory[kind])]
    sizes = [[nbytes / 1e9 for nbytes in lifetimes.memory[kind]] for kind in kinds]
    axes.stackplot(starts, *sizes, labels=kinds, colors=[COLORS[kind] for kind in kinds], linewidth=0)
    axes.axhline(hardware.gpu_bytes / 1e9, color="black", linewidth=0.8, linestyle="--", label="GPU memory")
    axes.set_title(f"{lifetimes.name}: memory of a step", fontsize=9)
    axes.set_xlabel("seconds of GPU time")
    axes.set_ylabel("GB")
    axes.legend(fontsize=7, loc="upper right")
