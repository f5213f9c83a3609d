"""The demo's report: one self-contained HTML page and its picture."""

from __future__ import annotations

import base64
import html
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import output
from matplotlib.ticker import NullFormatter, ScalarFormatter

LABELS = {
    "no-communication": "no communication",
    "gloo": "DDP on Gloo",
    "gloo-fp16": "DDP + fp16 hook",
    "gloo-powersgd": "DDP + PowerSGD",
    "paceline-exact": "Paceline exact",
    "paceline-fp16": "Paceline fp16",
    "paceline-topk": "Paceline top-k 1 %",
}
COLORS = {
    "no-communication": "#9aa0a6",
    "gloo": "#c6803a",
    "gloo-fp16": "#d9a05f",
    "gloo-powersgd": "#e8c08f",
    "paceline-exact": "#7fb2e5",
    "paceline-fp16": "#3f83c9",
    "paceline-topk": "#12497f",
}


def throughput(axis, cluster: dict) -> None:
    runs = cluster["runs"][::-1]
    names = [LABELS[r["name"]] for r in runs]
    values = [r["samples_per_s"] for r in runs]
    bars = axis.barh(names, values, color=[COLORS[r["name"]] for r in runs], height=0.68)
    plain = next((r["samples_per_s"] for r in runs if r["name"] == "gloo"), None)
    for bar, run in zip(bars, runs):
        text = f" {run['samples_per_s']:.0f}"
        if plain and run["name"] not in ("gloo", "no-communication"):
            text += f"  ({run['samples_per_s'] / plain:.1f} × Gloo)"
        end = bar.get_width()
        if run["name"].startswith("paceline"):
            limit = run["samples_per_s"] / run["floor_share"]
            end = max(end, limit)
            axis.plot([limit] * 2, [bar.get_y(), bar.get_y() + bar.get_height()], color="#222", lw=1.6)
        axis.text(end, bar.get_y() + bar.get_height() / 2, text, va="center", fontsize=8.5)
    axis.set_xlim(0, max(values) * 1.3)
    axis.set_xlabel("samples per second (line: what the link and the cores allow)")
    axis.set_title(f"Throughput, {cluster['nodes']} nodes × {cluster['slots']}", loc="left", fontweight="bold")


def loss(axis, cluster: dict) -> None:
    for run in cluster["runs"]:
        if run["name"] == "no-communication":
            continue  # its ranks drift apart: no training worth the name
        elapsed, at = [], 0.0
        for seconds in run["block_s"]:
            at += seconds
            elapsed.append(at)
        axis.plot(elapsed, run["block_loss"], color=COLORS[run["name"]], lw=1.8, label=LABELS[run["name"]])
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(ScalarFormatter())
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel("wall-clock seconds of training")
    axis.set_ylabel("training loss")
    if axis.lines:
        axis.legend(fontsize=8, frameon=False)
    axis.set_title("Loss over time, equal number of steps", loc="left", fontweight="bold")


def link_bytes(axis, cluster: dict) -> None:
    runs = [r for r in cluster["runs"] if r["name"] != "no-communication"][::-1]
    at = range(len(runs))
    measured = [r["bytes_measured"] / 1e6 for r in runs]
    predicted = [r["bytes_predicted"] / 1e6 for r in runs]
    axis.barh([i + 0.19 for i in at], measured, height=0.36, color=[COLORS[r["name"]] for r in runs])
    axis.barh([i - 0.19 for i in at], predicted, height=0.36, color="none", edgecolor="#444", hatch="////", lw=0.8)
    for i, run in zip(at, runs):
        off = run["bytes_measured"] / run["bytes_predicted"] - 1 if run["bytes_predicted"] else 0
        axis.text(max(measured[i], predicted[i]), i, f"  {measured[i]:.2f} MB ({off:+.1%})", va="center", fontsize=8.5)
    axis.set_yticks(list(at), [LABELS[r["name"]] for r in runs])
    axis.set_xlim(0, max(measured + predicted, default=1) * 1.32)
    axis.set_xlabel("MB a step, busiest link (filled: measured, hatched: predicted)")
    axis.set_title("Bytes over the wire", loc="left", fontweight="bold")


def figure(cluster: dict):
    fig, axes = plt.subplots(1, 3, figsize=(17, 4.6), constrained_layout=True)
    throughput(axes[0], cluster)
    loss(axes[1], cluster)
    link_bytes(axes[2], cluster)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8.5)
    return fig


def png(fig) -> bytes:
    picture = output.drawn(fig)
    plt.close(fig)
    return picture


def table(cluster: dict) -> str:
    head = (
        "run",
        "samples/s",
        "step ms",
        "of no communication",
        "of its floor",
        "MB a step",
        "predicted MB",
        "codec ms",
        "accuracy",
    )
    rows = []
    for r in cluster["runs"]:
        cells = (
            LABELS[r["name"]],
            f"{r['samples_per_s']:.0f}",
            f"{r['step_s'] * 1e3:.0f}",
            f"{r['share_of_no_comm']:.1%}",
            f"{r['floor_share']:.1%}",
            f"{r['bytes_measured'] / 1e6:.2f}",
            f"{r['bytes_predicted'] / 1e6:.2f}",
            f"{r['codec_s'] * 1e3:.1f}" if r["codec_s"] else "–",
            f"{r['final_accuracy']:.2%}",
        )
        ours = " class='ours'" if r["name"].startswith("paceline") else ""
        rows.append(f"<tr{ours}>" + "".join(f"<td>{html.escape(c)}</td>" for c in cells) + "</tr>")
    return f"<table><tr>{''.join(f'<th>{h}</th>' for h in head)}</tr>{''.join(rows)}</table>"


def calibration(cluster: dict) -> str:
    parts = []
    for link in cluster["lab"]["links"]:
        c = link.get("calibration")
        if c:
            up, down = c["up"]["payload_bps"] / 1e6, c["down"]["payload_bps"] / 1e6
            parts.append(f"node{link['node']} {up:.0f} up, {down:.0f} down")
    return "Measured before the run (TCP payload, Mb/s): " + "; ".join(parts) if parts else ""


def headline(clusters: list[dict]) -> str:
    runs = {r["name"]: r for r in clusters[0]["runs"]}
    if not {"gloo", "paceline-topk"} <= runs.keys():
        return "Data-parallel training on a slow link"
    gain = runs["paceline-topk"]["samples_per_s"] / runs["gloo"]["samples_per_s"]
    return f"{gain:.1f} × the throughput of plain DDP, with one import"


STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:1200px;margin:2.5em auto;padding:0 1em;color:#1d2733}
h1{font-size:1.9em;line-height:1.2;margin:0 0 .2em} h2{margin-top:2em} img{width:100%}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:.92em}
th,td{padding:.35em .6em;text-align:right;border-bottom:1px solid #e3e8ee}
th:first-child,td:first-child{text-align:left}
th{font-weight:600;color:#53606e} .ours td{background:#f0f6fc} small,.note{color:#53606e;font-size:.88em}
"""


def write(clusters: list[dict], out: Path) -> None:
    """report.html, and a PNG per cluster (demo.png is the first one's)."""
    sections = []
    for i, c in enumerate(clusters):
        picture = png(figure(c))
        output.write(out / ("demo.png" if i == 0 else f"demo-{c['nodes']}x{c['slots']}.png"), picture)
        inline = base64.b64encode(picture).decode()
        steps = c["runs"][0]["steps"]
        sections.append(
            f"<h2>{c['nodes']} nodes × {c['slots']} rank{'s' if c['slots'] > 1 else ''}, "
            f"{c['lab']['rate_bps'] / 1e9:g} Gb/s Ethernet</h2><img alt='charts' src='data:image/png;base64,{inline}'>"
            f"{table(c)}<p class='note'>{html.escape(calibration(c))}. PowerSGD at rank {c['power_rank']}, the fastest "
            f"of 1, 2, 4 here, the fp16 hook with buckets of {c['fp16_bucket_mb']} MiB, the faster of 4 and 25. "
            f"{steps} steps each, equal seeds and batches, blocks in random order within one launch, "
            f"medians. torch {c['torch']}, {c['threads']} thread{'s' if c['threads'] > 1 else ''} a rank.</p>"
        )
    c = clusters[0]
    page = f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>Paceline demo</title><style>{STYLE}</style>
<h1>{headline(clusters)}</h1>
<p>A {c["parameters"] / 1e6:.1f} M-parameter network learns scikit-learn's handwritten digits, {c["batch"]} samples
a rank and step, tested on {c["test_samples"]:,} samples. The script is the same for all runs; nodes are
network namespaces of one machine, and each link's speed is real in both directions.</p>
{"".join(sections)}
<h2>How to read it</h2>
<p><b>of no communication</b>: throughput against DDP whose hook returns at once, all ranks running.
<b>of its floor</b>: the least time that a synchronous step can take, max(compute + codec alone, forward + bytes / 95 %
of the line), over the time measured, round by round (medians); the codec's time is measured for Paceline's only, so
the floors of torch's hooks are lower than what they could reach. <b>MB a step</b>: bytes of Ethernet frames on the
busiest link, counted
at the queue that shapes it; <b>predicted</b>: for Paceline what its plan said beforehand, for the others a ring's
arithmetic.</p></html>
"""
    output.write(out / "report.html", page)
