#!/usr/bin/env python3
"""Draws what `nanovllm bench latency --json FILE` measured: the share of the physical floor by batch size, a line for each file.

    tools/plot_floor.py qwen3-0.6b.json qwen3-8b.json --output docs/decode-floor.svg

Needs nothing beyond Python's standard library.
"""
import argparse
import html
import json
import math
import pathlib

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 140, 64, 56
COLOURS = ["#1f6feb", "#d1570a", "#1a7f37", "#8250df", "#bf3989", "#57606a"]


def element(name, text=None, **attributes):
    fields = "".join(f' {key.replace("_", "-")}="{html.escape(str(value))}"' for key, value in attributes.items())
    return f"<{name}{fields}/>" if text is None else f"<{name}{fields}>{html.escape(text)}</{name}>"


def read(path):
    """The model's name, the device, and (batch size, share in percent, ms) of the longest prompt's rows."""
    report = json.loads(path.read_text())
    rows = [row for row in report["rows"] if row.get("share") is not None]
    if report["benchmark"] != "latency" or not rows:
        raise SystemExit(f"{path}: not a report of `bench latency` with floors")
    longest = max(row["input_len"] for row in rows)
    points = sorted((row["batch_size"], 100 * row["share"], row["measured"]) for row in rows if row["input_len"] == longest)
    return {"name": pathlib.Path(report["model"]).name, "device": report["device"], "prompt": longest, "points": points}


class Plot:
    def __init__(self, reports):
        batches = sorted({batch for report in reports for batch, _, _ in report["points"]})
        self.batches, self.low, self.high = batches, math.log2(batches[0]), math.log2(batches[-1])
        self.top = max(100, 20 * math.ceil(max(share for r in reports for _, share, _ in r["points"]) / 20))

    def x(self, batch):
        span = self.high - self.low
        return round(LEFT + (WIDTH - LEFT - RIGHT) * ((math.log2(batch) - self.low) / span if span else 0.5), 1)

    def y(self, share):
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share / self.top, 1)

    def axes(self):
        for share in range(0, self.top + 1, 20):
            y = self.y(share)
            yield element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, stroke="#8c959f" if share in (0, 100) else "#d8dee4")
            yield element("text", f"{share} %", x=LEFT - 8, y=y + 4, text_anchor="end")
        for batch in self.batches:
            yield element("text", str(batch), x=self.x(batch), y=HEIGHT - BOTTOM + 20, text_anchor="middle")
        middle = (LEFT + WIDTH - RIGHT) / 2
        yield element("text", "sequences decoding at once", x=middle, y=HEIGHT - 12, text_anchor="middle")

    def line(self, report, colour):
        points = [(self.x(batch), self.y(share)) for batch, share, _ in report["points"]]
        yield element("polyline", points=" ".join(f"{x},{y}" for x, y in points), fill="none", stroke=colour, stroke_width=2)
        for (x, y), (batch, share, ms) in zip(points, report["points"]):
            tip = element("title", f"{report['name']}, batch {batch}: {ms:.3f} ms a token, {share:.0f} % of the floor")
            yield f'<circle cx="{x}" cy="{y}" r="4" fill="{colour}">{tip}</circle>'
            yield element("text", f"{share:.0f}", x=x, y=y - 9, text_anchor="middle", fill=colour)


    def names(self, reports):
        """Each line's name at its end, at least a line's height apart."""
        above = 0
        for share, i in sorted(((report["points"][-1][1], i) for i, report in enumerate(reports)), reverse=True):
            above = max(self.y(share) + 4, above + 15)
            x = self.x(reports[i]["points"][-1][0]) + 12
            yield element("text", reports[i]["name"], x=x, y=above, fill=COLOURS[i % len(COLOURS)], font_weight="bold")


def draw(reports):
    plot = Plot(reports)
    first = reports[0]
    device = first["device"].split(" ", 1)[-1]
    parts = [
        element("rect", width=WIDTH, height=HEIGHT, fill="#ffffff"),
        element("text", "Decoding: share of the physical floor reached", x=LEFT, y=26, font_size=16, font_weight="bold"),
        element("text", f"{device}, prompts of {first['prompt']} tokens; 100 %: every byte read once at the device's bandwidth", x=LEFT, y=46),
    ]
    parts += plot.axes()
    for i, report in enumerate(reports):
        parts += plot.line(report, COLOURS[i % len(COLOURS)])
    parts += plot.names(reports)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12" fill="#24292f">'
    return "\n".join([head, *parts, "</svg>", ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("reports", type=pathlib.Path, nargs="+", help="JSON of `nanovllm bench latency`")
    parser.add_argument("--output", type=pathlib.Path, required=True, help="the SVG to write")
    options = parser.parse_args()
    options.output.write_text(draw([read(path) for path in options.reports]))


if __name__ == "__main__":
    main()
