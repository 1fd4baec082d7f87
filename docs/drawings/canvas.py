"""A drawing as SVG text: boxes, arrows and words, legible on light pages and on dark ones.

A drawing has a card of its own below it, whose colours follow the reader's preference; so it can be
read wherever it is shown, also by viewers that know no preference. Units are pixels.
"""

from __future__ import annotations

from html import escape

# Class -> its declarations on a light card, and on a dark one. The text on each has a contrast of
# 7 : 1 at least. Hues h0 ... h4 tell chunks, or ranks, apart; none of them carries meaning alone.
_COLOURS = {
    "card": ("fill:#ffffff;stroke:#d0d7de", "fill:#161b22;stroke:#3d444d"),
    "ink": ("fill:#1f2328", "fill:#f0f3f6"),
    "soft": ("fill:#4b535b", "fill:#b7bfc8"),
    "line": ("stroke:#57606a;fill:none", "stroke:#9ea7b3;fill:none"),
    "head": ("fill:#57606a", "fill:#9ea7b3"),
    "empty": ("fill:#f6f8fa;stroke:#8c959f", "fill:#21262d;stroke:#7d8590"),
    "h0": ("fill:#cfe3ff;stroke:#2f6fbf", "fill:#123a70;stroke:#79b0ff"),
    "h1": ("fill:#ffe2c4;stroke:#b0640f", "fill:#5e3408;stroke:#f0a35c"),
    "h2": ("fill:#d3f2d3;stroke:#2b7a3b", "fill:#134a22;stroke:#6fcf83"),
    "h3": ("fill:#f8d7ea;stroke:#a03a76", "fill:#611b45;stroke:#f29ccb"),
    "h4": ("fill:#e6ddfb;stroke:#6b4bb5", "fill:#3c2870;stroke:#bda4f5"),
}
_SHAPES = (
    "text{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}"
    ".title{font-weight:600;font-size:15px}.small{font-size:11px}.middle{text-anchor:middle}"
    ".end{text-anchor:end}rect,path,line{stroke-width:1.2}.dashed{stroke-dasharray:4 3}"
)


class Canvas:
    """What is drawn, in the order in which it is drawn.

    Args:
        width: of the card, in pixels.
        height: likewise.
        title: what the drawing is called.
        text: what it says, for those who do not see it.
    """

    def __init__(self, width: int, height: int, title: str, text: str) -> None:
        self.width, self.height, self.title, self.alternative = width, height, title, text
        self._parts: list[str] = []

    def box(
        self, x: float, y: float, w: float, h: float, text: str = "", kind: str = "empty"
    ) -> None:
        """Draw a rectangle with lines of words in its middle."""
        self._add(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="3"/>')
        lines = text.split("\n") if text else []
        for i, line in enumerate(lines):
            down = y + h / 2 + 4.5 + (i - (len(lines) - 1) / 2) * 16
            self.text(x + w / 2, down, line, "ink middle")

    def text(self, x: float, y: float, text: str, kind: str = "ink") -> None:
        """Write one line, whose left end, middle or right end is at x, as `kind` says."""
        self._add(f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(text)}</text>')

    def arrow(self, x0: float, y0: float, x1: float, y1: float, kind: str = "line") -> None:
        """Draw a straight line with a head at its second end."""
        path = f'class="{kind}" x1="{x0:g}" y1="{y0:g}" x2="{x1:g}" y2="{y1:g}"'
        self._add(f'<line {path} marker-end="url(#head)"/>')

    def line(self, x0: float, y0: float, x1: float, y1: float, kind: str = "line") -> None:
        """Draw a straight line."""
        self._add(f'<line class="{kind}" x1="{x0:g}" y1="{y0:g}" x2="{x1:g}" y2="{y1:g}"/>')

    def svg(self) -> str:
        """Return the drawing as a file's text."""
        light = "".join(f".{name}{{{day}}}" for name, (day, _) in _COLOURS.items())
        dark = "".join(f".{name}{{{night}}}" for name, (_, night) in _COLOURS.items())
        head = '<path class="head" d="M0,0 L8,4 L0,8 z"/>'
        return "\n".join(
            [
                '<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-labelledby="t d" '
                f'width="{self.width}" height="{self.height}" '
                f'viewBox="0 0 {self.width} {self.height}">',
                f'<title id="t">{escape(self.title)}</title>',
                f'<desc id="d">{escape(self.alternative)}</desc>',
                f"<style>{_SHAPES}{light}@media (prefers-color-scheme:dark){{{dark}}}</style>",
                '<defs><marker id="head" markerWidth="8" markerHeight="8" refX="7" refY="4" '
                f'orient="auto" markerUnits="userSpaceOnUse">{head}</marker></defs>',
                f'<rect class="card" x="0.6" y="0.6" width="{self.width - 1.2:g}" '
                f'height="{self.height - 1.2:g}" rx="8"/>',
                f'<text class="ink title" x="20" y="30">{escape(self.title)}</text>',
                *self._parts,
                "</svg>",
                "",
            ]
        )

    def _add(self, part: str) -> None:
        self._parts.append(part)
