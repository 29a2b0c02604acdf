"""The chart of docs/parallelism.md: measured speed-ups beside the model's, and what it predicts for GPUs."""

from pathlib import Path

from benchmarks.scaling.documents import BATCHES, Cases, Records, links, median, modelled
from benchmarks.scaling.model import MACHINES, untrained
from benchmarks.scaling.steps import Case, Transport

_BLUE = "#1d4ed8"
_ORANGE = "#c2410c"
_GREY = "#6b7280"
_LINES = ("#c2410c", "#ca8a04", "#1d4ed8", "#047857")


def draw(cases: Cases, records: Records, path: Path) -> None:
    """Draw a row for each case (dots: every round; line: median; ring: model), and efficiency by number of GPUs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(
        1, 2, figsize=(9.5, 4.8), layout="constrained", width_ratios=(1, 1)
    )
    transport = next(case for case in cases if isinstance(case, Transport))
    by_k = links(transport, records[transport.name])
    steps = [case for case in cases if isinstance(case, Case)]
    for row, case in enumerate(steps):
        record = records[case.name]
        one = median(record, "1")
        for k, colour, shift in ((2, _BLUE, -0.17), (4, _ORANGE, 0.17)):
            y = row + shift
            speeds = [one / seconds for seconds in record["seconds"][str(k)]]
            left.plot(speeds, [y] * len(speeds), "o", ms=4, alpha=0.5, color=colour)
            left.plot([one / median(record, str(k))] * 2, [y - 0.15, y + 0.15], lw=2, color=colour)
            left.plot(
                one / modelled(case, record, k, by_k[k]), y, "o", ms=9, mfc="none", mec=colour
            )
    for colour, name in ((_BLUE, "2 processes"), (_ORANGE, "4 on 2 cores")):
        left.plot([], [], "o-", ms=4, color=colour, label=name)
    left.plot([], [], "o", ms=9, mfc="none", mec=_GREY, label="model")
    left.axvline(1, color=_GREY, lw=1, ls="--")
    left.set_yticks(range(len(steps)), [case.name for case in steps])
    left.set(
        xlim=(0, 2.05), xlabel="speed-up over one process, same batch", title="Measured on 2 cores"
    )
    left.invert_yaxis()
    left.legend(loc="upper center", bbox_to_anchor=(0.3, -0.14), ncols=3, frameon=False, fontsize=9)

    network, counts = untrained("resnet18", 1000), (1, 2, 4, 8, 16, 32, 64)
    for machine, colour in zip(MACHINES, _LINES, strict=True):
        low, high = (
            [100 * machine.efficiency(network, k, BATCHES[1], "frozen", overlap) for k in counts]
            for overlap in (False, True)
        )
        right.fill_between(counts, low, high, color=colour, alpha=0.15, lw=0)
        right.plot(counts, high, "-", color=colour, label=machine.name)
    right.set_xscale("log", base=2)
    right.set_xticks(counts, [str(k) for k in counts])
    right.set(
        ylim=(0, 104),
        xlabel=f"GPUs, 8 in a machine; batch of {BATCHES[1]:,}",
        ylabel="efficiency, %",
    )
    right.set_title("Predicted, not measured")
    right.legend(
        loc="lower left",
        frameon=False,
        fontsize=8.5,
        title="upper edge: buckets overlap",
        alignment="left",
    )
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
