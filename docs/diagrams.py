"""Draws the two diagrams of how-it-works.md as SVG: `python docs/diagrams.py` rewrites docs/img.

Standard library only and no dates, so that the files change only when this file does; a test holds
them against it.
"""

from __future__ import annotations

from html import escape
from itertools import pairwise
from pathlib import Path

HERE = Path(__file__).parent / "img"

INK, MUTED, PAPER, LINE = "#1f2933", "#5f6c7b", "#ffffff", "#9aa5b1"
FP8, WIDE, OURS, WARN, CALM = "#d64545", "#8a2c2c", "#2f8132", "#b44d12", "#f0f4f8"


class Canvas:
    """A growing SVG; coordinates in pixels, origin top left."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" '
            'font-family="Helvetica, Arial, sans-serif">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto">'
            f'<path d="M0 0L8 4L0 8z" fill="{MUTED}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" rx="8" fill="{PAPER}"/>',
        ]

    def text(
        self, x: float, y: float, words: str, *, size: int = 13, color: str = INK,
        anchor: str = "start", bold: bool = False,
    ) -> None:  # fmt: skip
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x}" y="{y}" font-size="{size}" fill="{color}" text-anchor="{anchor}"'
            f"{weight}>{escape(words)}</text>"
        )

    def box(
        self, x: float, y: float, w: float, h: float, *lines: str,
        edge: str = LINE, fill: str = CALM, size: int = 13,
    ) -> None:  # fmt: skip
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="5" fill="{fill}" stroke="{edge}" '
            'stroke-width="1.5"/>'
        )
        top = y + h / 2 - (len(lines) - 1) * (size + 4) / 2 + size / 2 - 2
        for i, line in enumerate(lines):
            self.text(
                x + w / 2, top + i * (size + 4), line, size=size, anchor="middle", bold=i == 0
            )

    def arrow(
        self, *points: tuple[float, float], label: str = "", at: tuple[float, float] | None = None
    ) -> None:
        path = " ".join(f"{x},{y}" for x, y in points)
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{MUTED}" stroke-width="1.5" '
            'marker-end="url(#tip)"/>'
        )
        if label:
            x, y = at or points[0]
            self.text(x, y, label, size=12, color=MUTED)

    def cells(self, x: float, y: float, live: set[int], fill: str, *, all_filled: bool) -> None:
        """A strip of 40 pool rows; `live` ones in full colour, the others pale or empty."""
        for i in range(40):
            color = fill if i in live or all_filled else PAPER
            opacity = 1 if i in live else 0.35 if all_filled else 1
            self.parts.append(
                f'<rect x="{x + i * 11}" y="{y}" width="9" height="26" fill="{color}" '
                f'fill-opacity="{opacity}" stroke="{LINE}" stroke-width="0.8"/>'
            )

    def svg(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])


def decode_step() -> str:
    """Stock against ours, for one layer of one decode step."""
    live = {3, 4, 5, 17, 29}
    c = Canvas(900, 560, "One decode step: stock casts every pool row, we cast the live ones")
    left, right = 30, 560

    c.text(left, 36, "Stock flashinfer, in every layer of every step", size=16, bold=True)
    c.text(left, 66, "FP8 pool: 5 live rows, 35 that nobody references", color=MUTED)
    c.cells(left, 76, live, FP8, all_filled=True)
    c.arrow((left + 215, 106), (left + 215, 146), label="cast all: read 576 B, write 1152 B a row",
            at=(left + 228, 130))  # fmt: skip
    c.cells(left, 152, live, WIDE, all_filled=True)
    c.text(left, 198, "a bf16 copy of the whole pool, allocated and thrown away", color=MUTED)
    c.arrow((left + 440, 165), (right - 8, 165))
    c.box(right, 136, 300, 58, "FlashInfer, 16-bit kernel", "reads the 5 live rows of the copy")

    c.parts.append(f'<path d="M30 226H870" stroke="{LINE}" stroke-dasharray="4 4"/>')

    c.text(left, 262, "This package", size=16, bold=True)
    c.box(left, 280, 250, 58, "once per step", "kv_indices, shared prefixes repeated", edge=OURS)
    c.arrow((left + 250, 309), (left + 300, 309))
    c.box(
        left + 306, 280, 230, 58, "the distinct live slots", "listed on the GPU, no sync", edge=OURS
    )
    c.arrow((left + 536, 309), (right + 50, 309))
    c.box(
        right + 56,
        280,
        244,
        58,
        "every layer reuses the list",
        "as CUDA graph replays do",
        edge=OURS,
    )

    c.text(left, 378, "in every layer, the FP8 pool", color=MUTED)
    c.cells(left, 388, live, FP8, all_filled=False)
    c.arrow((left + 215, 418), (left + 215, 458), label="gather_cast: the 5 live rows alone",
            at=(left + 228, 442))  # fmt: skip
    c.cells(left, 464, set(range(len(live))), WIDE, all_filled=False)
    c.text(left, 510, "a bf16 workspace, allocated once: the live rows, packed;", color=MUTED)
    c.text(left, 527, "indices renumbered once per step; the rest is never read", color=MUTED)
    c.arrow((left + 440, 477), (right - 8, 477))
    c.box(right, 448, 300, 58, "FlashInfer, 16-bit kernel", "the bits that stock gives it")
    c.arrow((left + 440, 401), (right - 8, 401))
    c.box(right, 372, 300, 58, "native or fused kernel", "reads the FP8 rows in place", edge=OURS)
    return c.svg()


def which_path() -> str:
    """The choice, once per phase, when the server starts."""
    c = Canvas(900, 600, "Which path attends: the choice for decode and for extend")
    x, w, h = 40, 270, 54
    rows = [40, 130, 220, 330, 420, 510]
    c.box(x, rows[0], w, h, "an MLA model?")
    c.box(x, rows[1], w, h, "an FP8 pool, e4m3 or e5m2?")
    c.box(x, rows[2], w, h, "a dense pool?", "576-byte rows, not DSA's 656")
    c.box(x, rows[3], w, h, "a path forced?", "SGLANG_FP8MLA_…_PATH")
    c.box(x, rows[4], w, h, "a table for this GPU?", "your profile, or the shipped one")
    c.box(x, rows[5], w, h, "the fastest path of it", "for these heads and batches")
    for top, bottom in pairwise(rows):
        word = "no" if top == rows[3] else "yes"
        c.arrow(
            (x + 135, top + h),
            (x + 135, bottom - 4),
            label=word,
            at=(x + 144, (top + h + bottom) / 2 + 3),
        )

    out, wide = 560, 300

    def leave(row: int, label: str, *lines: str, edge: str = LINE) -> None:
        c.arrow(
            (x + w, row + h / 2),
            (out - 6, row + h / 2),
            label=label,
            at=(x + w + 10, row + h / 2 - 6),
        )
        c.box(out, row, wide, h, *lines, edge=edge)

    leave(rows[0], "no", "stock flashinfer", "whole, under our name")
    leave(rows[1], "no", "stock flashinfer's MLA", "there is nothing to cast")
    leave(rows[2], "no", "refused at start", "the message has the recipe", edge=WARN)
    leave(rows[4], "no", "gather_cast", "wherever FlashInfer's MLA kernel runs", edge=OURS)
    for row in rows[3], rows[5]:
        c.arrow((x + w, row + h / 2), (370, row + h / 2))
        c.box(376, row, 150, h, "its probe", "passes?")
    c.text(x + w + 10, rows[3] + h / 2 - 6, "yes", size=12, color=MUTED)
    c.arrow((526, rows[3] + 14), (554, rows[3] - 2), label="yes", at=(520, rows[3] - 8))
    c.box(out, rows[3] - 22, wide, 38, "that path, always", edge=OURS)
    c.arrow((526, rows[3] + 40), (554, rows[3] + 52), label="no", at=(524, rows[3] + 66))
    c.box(out, rows[3] + 30, wide, 38, "refused at start, with the check", edge=WARN)
    # a probe that fails in auto falls back
    middle = rows[5] + h / 2
    c.arrow((526, middle), (out - 6, middle), label="yes", at=(530, middle - 6))
    c.box(
        out, rows[5], wide, h, "native, fused or gather_cast", "logged with the reason", edge=OURS
    )
    c.arrow((451, rows[5]), (451, rows[4] + h / 2 + 5), label="no, logged", at=(460, rows[5] - 12))
    return c.svg()


DIAGRAMS = {"decode-step.svg": decode_step, "which-path.svg": which_path}


def main() -> None:
    HERE.mkdir(exist_ok=True)
    for name, draw in DIAGRAMS.items():
        (HERE / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
