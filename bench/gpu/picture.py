#!/usr/bin/env python3
"""A picture of train.py's results: for each model the speed of every path, and how far its floor lets it come.

    python bench/gpu/picture.py build/bench-gpu/train.json --out docs/gpu.png

Several files may be given; of a model that several have, the last counts.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from train_paths import OURS, label, parts

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools" / "demo"))  # behind this folder: both have a train.py

import output

PEER, OWN, NOTHING = "#d9a05f", "#3f83c9", "#9aa0a6"


def read_models(files):
    """{model: its result}, in the order in which they were met; exits with a sentence where a file has none."""
    models = {}
    for file in files:
        try:
            found = json.loads(Path(file).read_text())["models"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            sys.exit(f"picture: {file} is no result of train.py ({error}); give its train.json")
        for result in found:
            if result["paths"].get("none"):
                models[result["model"]] = result
    if not models:
        sys.exit(f"picture: no model in {', '.join(map(str, files))} has the path 'none', with which all are compared")
    return models


def bars(result):
    """(label, share of the speed without communication, the floor's share or None, colour), slowest last."""
    none = result["paths"]["none"]["seconds"]
    rows = []
    for path, figures in result["paths"].items():
        colour = NOTHING if path == "none" else OWN if parts(path)[0] in OURS else PEER
        floor = none / figures["floor"] if figures.get("floor") and path != "none" else None
        rows.append((label(path), none / figures["seconds"], floor, colour))
    return rows


def draw(models, out):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(2, len(models))
    lines = -(-len(models) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(7.2 * columns, 3.6 * lines), squeeze=False)
    for axis in axes.flat[len(models) :]:
        axis.axis("off")
    for axis, (name, result) in zip(axes.flat, models.items()):
        rows = bars(result)[::-1]
        drawn = axis.barh(
            [row[0] for row in rows], [row[1] for row in rows], color=[row[3] for row in rows], height=0.7
        )
        for bar, (_, share, floor, _) in zip(drawn, rows):
            middle = bar.get_y() + bar.get_height() / 2
            if floor is not None:
                axis.plot([floor] * 2, [bar.get_y(), bar.get_y() + bar.get_height()], color="#222", lw=1.6)
            axis.text(max(share, floor or 0) + 0.01, middle, f"{share:.0%}", va="center", fontsize=8.5)
        axis.set_xlim(0, 1.12)
        axis.set_xlabel("speed, of no communication (line: what the bytes allow)")
        axis.set_title(f"{name}, {result['nodes']} nodes × {result['slots']} GPUs", loc="left", fontweight="bold")
    figure.tight_layout()
    output.write(out, output.drawn(figure, out.suffix[1:] or "png"), "picture")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="+", type=Path, help="train.py's train.json")
    parser.add_argument("--out", type=Path, default=Path("gpu.png"))
    args = parser.parse_args()
    draw(read_models(args.results), args.out)


if __name__ == "__main__":
    main()
